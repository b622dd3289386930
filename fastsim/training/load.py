"""Loads a model from its folder, and evaluates it or searches with it."""

import torch

from fastsim.dot_products import as_cosines
from fastsim.encoders.cross_encoder import CrossEncoder, is_cross_encoder
from fastsim.encoders.encoder import Encoder
from fastsim.encoders.model_files import model_folder
from fastsim.encoders.names import ModelError
from fastsim.scores import top_k
from fastsim.training import evaluation
from fastsim.training.objectives import read_classifier
from fastsim.training.prompts import check_prompts, check_used
from fastsim.training.similarity import similarity_of


def load_encoder(
    name, *, cpu=False, max_length=None, prompts=None, parts=("query", "document"), **trust
):
    """An `Encoder`, on the GPU if there is one; `ModelError` for a cross-encoder.

    prompts: {name: text}, in addition to those of the model. parts: the columns, or the parts of a
    search, that will be encoded; ValueError for a prompt that applies to none of them.
    """
    check_prompts(prompts)
    folder = model_folder(name, **trust)
    if is_cross_encoder(folder):
        raise ModelError(
            f"model: wanted an encoder, got the cross-encoder {str(name)!r}, which gives scores of"
            " pairs and no embeddings"
        )
    encoder = Encoder.from_pretrained(folder, max_length=max_length, **trust)
    encoder.prompts |= prompts or {}
    check_used(prompts, encoder, parts)
    return _on_device(encoder, cpu)


def evaluate_model(name, dataset, layout, *, batch_size=32, max_length=None, cpu=False,
                   prompts=None, **trust):  # fmt: skip
    """Metrics of an encoder or cross-encoder, given by its folder or name, on a data set."""
    folder = model_folder(name, **trust)
    if is_cross_encoder(folder):
        if prompts:
            raise ValueError(f"prompts: cannot be combined with a cross-encoder (got {prompts!r})")
        evaluation.check_evaluation(dataset, layout, cross_encoder=True)
        model = CrossEncoder.from_pretrained(folder, max_length=max_length, **trust)
        return evaluation.evaluate_cross_encoder(
            _on_device(model, cpu), dataset, layout, batch_size=batch_size, progress=None
        )
    options = {"cpu": cpu, "max_length": max_length, "prompts": prompts, **trust}
    encoder = load_encoder(folder, parts=layout.texts, **options)
    classifier = None
    if layout.name == "labelled pairs":
        classifier = read_classifier(folder, encoder.dim)
    return evaluation.evaluate_encoder(
        encoder, dataset, layout, classifier=classifier, batch_size=batch_size, progress=None
    )


def search_texts(encoder, queries, texts, k, *, batch_size=32, corpus=None):
    """The k texts most similar to each query: a list of {query, hits: [{rank, score, row, text}]}.

    k is at most the number of texts. corpus: embeddings of the texts; None: they are encoded. The
    scores are the encoder's own similarity, cosine or dot; ModelError for any other.
    """
    similarity = similarity_of(encoder)
    if corpus is None:
        corpus = encoder.encode_document(texts, batch_size=batch_size)
    corpus = evaluation.check_vectors(corpus)
    vectors = evaluation.check_vectors(encoder.encode_query(queries))
    vectors, corpus, factors = as_cosines(vectors, corpus, similarity)
    values, rows = top_k(vectors, corpus, min(k, len(texts)))
    values = values * factors
    return [
        {
            "query": query,
            "hits": [
                {"rank": rank, "score": score, "row": row, "text": texts[row]}
                for rank, (score, row) in enumerate(zip(*pair, strict=True), start=1)
            ],
        }
        for query, pair in zip(
            queries, zip(values.tolist(), rows.tolist(), strict=True), strict=True
        )
    ]


def _on_device(model, cpu):
    return model.to("cuda") if torch.cuda.is_available() and not cpu else model
