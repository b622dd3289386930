"""Evaluates a model on a data set, whose columns decide the metrics."""

from collections import defaultdict

import torch

from fastsim.encoders.names import ModelError
from fastsim.training import metrics
from fastsim.training.similarity import ranking_similarity

# Format -> the metric that selects the best model. {}: the model's similarity.
PRIMARY = {
    "scored pairs": "spearman_{}",
    "labelled pairs": "average_precision_{}",
    "classes": "accuracy",
    "tuples": "ndcg@10",
    "triplets": "triplet_accuracy_{}",
    "labelled texts": "ndcg@10",
}
PRIMARY_OF_CROSS_ENCODER = {
    "scored pairs": "spearman",
    "labelled pairs": "average_precision",
}


def is_binary(labels):
    """Whether the labels are 0 and 1 (or false and true) and both occur."""
    return {str(label).lower() for label in labels} in ({"0", "1"}, {"false", "true"})


def as_binary(labels):
    """Binary labels as the ints 0 and 1."""
    return [int(str(label).lower() in ("1", "true")) for label in labels]


def primary_metric(layout, *, cross_encoder=False, classifier=False, similarity="cosine"):
    """The name of the metric that selects the best model on this data.

    similarity: of the model.
    """
    if cross_encoder:
        return PRIMARY_OF_CROSS_ENCODER[layout.name]
    kind = layout.name
    if kind == "labelled pairs" and classifier:
        kind = "classes"
    elif layout.negatives:
        kind = "triplets"
    return PRIMARY[kind].format(similarity)


def metric_names(layout, *, cross_encoder=False, classifier=False):
    """The names of all metrics on this data, from two made-up rows without an encoder."""
    rows, labels = torch.eye(2), [0, 1]
    if cross_encoder:
        scored = layout.name == "scored pairs"
        return list((metrics.correlations if scored else metrics.binary)(labels, labels))
    if layout.name == "scored pairs":
        return list(metrics.pair_correlations(rows, rows, labels))
    if layout.name == "labelled pairs":
        if classifier:
            return list(metrics.classes(rows, labels))
        return list(metrics.pair_binary(rows, rows, labels))
    names = metrics.triplets(rows, rows, rows) if layout.negatives else {}
    return [*names, *metrics.retrieval(rows, rows, [{0}, {1}])]


def check_evaluation(dataset, layout, *, cross_encoder=False, classes=None, name="data"):
    """ValueError for data without a metric for the model, before anything is encoded.

    name: of the option with the data, for messages.
    """
    if cross_encoder and layout.name not in PRIMARY_OF_CROSS_ENCODER:
        wanted = " or ".join(PRIMARY_OF_CROSS_ENCODER)
        raise ValueError(f"{name}: wanted {wanted} for a cross-encoder, got {layout.name}")
    if layout.name == "scored pairs" and len(set(dataset[layout.label][:])) < 2:
        raise ValueError(
            f"{name}: wanted at least two different scores, got"
            f" {dataset[layout.label][0]:g} in every row"
        )
    if layout.name == "labelled pairs":
        labels = dataset[layout.label][:]
        if classes is None and not is_binary(labels):
            examples = sorted({str(label) for label in labels})[:5]
            raise ValueError(
                f"{name}: wanted both labels 0 and 1, or a model trained with the loss"
                f" classification, got {', '.join(examples)}"
            )
        unknown = sorted(set(labels) - set(classes or labels))
        if unknown:
            raise ValueError(
                f"{name}: wanted classes that the model was trained on ({', '.join(classes)}),"
                f" got {unknown[0]!r}"
            )
    if layout.name == "labelled texts":
        pairs = set(
            zip(*(dataset[column][:] for column in (layout.texts[0], layout.label)), strict=True)
        )
        if len({label for _, label in pairs}) == len(pairs):
            raise ValueError(
                f"{name}: wanted at least one label with two different texts, got none"
            )


def check_vectors(vectors):
    """The embeddings; ModelError if some are not finite."""
    bad = ~vectors.isfinite().all(-1)
    if bool(bad.any()):
        raise ModelError(
            f"model: {int(bad.sum())} of {len(bad)} texts have an embedding with NaN or infinity"
        )
    return vectors


def evaluate_encoder(
    encoder, dataset, layout, *, classifier=None, batch_size=32, progress=False, width=None
):
    """Metrics of an `Encoder` on a data set: a dictionary of numbers.

    Scored pairs: Pearson and Spearman correlation for cosine, dot, Euclidean and Manhattan
    similarity.
    Labelled pairs: accuracy and macro F1 with a `classifier` (module, class names); otherwise, for
    labels 0 and 1, accuracy and F1 at the best threshold, and average precision.
    Tuples: triplet accuracy if there are negatives, and retrieval of the positives among all
    positives and negatives.
    Labelled texts: retrieval of the texts of the same label.

    Of several similarities the encoder's own comes first. Retrieval ranks by it if it is cosine or
    dot, otherwise by cosine.

    width: truncates the embeddings; None: the width that `encode` returns, or for a classifier the
    full width. ValueError for data without a metric.
    """
    check_evaluation(dataset, layout, classes=classifier and classifier[1])
    columns = [dataset[name][:] for name in layout.texts]
    prompts = [encoder.prompt_of_column(name) for name in layout.texts]
    pairs = zip(prompts, columns, strict=True)
    unique = list(dict.fromkeys((prompt, text) for prompt, column in pairs for text in column))
    options = {"batch_size": batch_size, "progress": progress}
    if classifier is not None:
        options["truncate_dim"] = encoder.dim
    vectors = check_vectors(_encode(encoder, unique, **options)[:, :width])
    row_of = {key: row for row, key in enumerate(unique)}
    rows = [
        [row_of[prompt, text] for text in column]
        for prompt, column in zip(prompts, columns, strict=True)
    ]
    parts = [vectors[column] for column in rows]
    own = {"similarity": encoder.similarity}
    if layout.name == "scored pairs":
        return metrics.pair_correlations(*parts, dataset[layout.label][:], **own)
    if layout.name == "labelled pairs":
        labels = dataset[layout.label][:]
        if classifier is None:
            return metrics.pair_binary(*parts, as_binary(labels), **own)
        return _of_classes(*classifier, *parts, labels)
    ranking = ranking_similarity(encoder)
    if layout.name == "tuples":
        accuracy = _triplet_accuracy(*parts, **own) if layout.negatives else {}
        texts = [text for _, text in unique]
        return accuracy | _tuples(vectors, rows, texts, similarity=ranking)
    return _labelled_texts(vectors, rows[0], dataset[layout.label][:], similarity=ranking)


def _of_classes(module, names, u, v, labels):
    """`metrics.classes` of a classifier on paired embeddings u, v (N, D)."""
    device = next(module.parameters()).device
    with torch.no_grad():
        logits = module.logits(u.to(device), v.to(device)).cpu()
    return metrics.classes(logits, [names.index(label) for label in labels])


def _encode(encoder, unique, **options):
    """Embeddings of [(prompt, text)]; each prompt has its own batches."""
    result = None
    for prompt in dict.fromkeys(prompt for prompt, _ in unique):
        rows = [row for row, (text_prompt, _) in enumerate(unique) if text_prompt == prompt]
        vectors = encoder.encode([unique[row][1] for row in rows], prompt=prompt, **options)
        if result is None:
            result = torch.empty(len(unique), vectors.shape[1])
        result[rows] = vectors
    return result


def evaluate_cross_encoder(model, dataset, layout, *, batch_size=32, progress=False):
    """Metrics of a `CrossEncoder`: correlations for scored pairs, `metrics.binary` for labels."""
    check_evaluation(dataset, layout, cross_encoder=True)
    texts = [dataset[name][:] for name in layout.texts]
    scores = model.score(*texts, batch_size=batch_size, progress=progress).tolist()
    labels = dataset[layout.label][:]
    if layout.name == "scored pairs":
        return metrics.correlations(scores, labels)
    return metrics.binary(scores, as_binary(labels))


def _triplet_accuracy(anchors, positives, *negatives, similarity):
    """`metrics.triplets`, averaged over the columns of negatives."""
    columns = [metrics.triplets(anchors, positives, n, similarity=similarity) for n in negatives]
    return {key: sum(values[key] for values in columns) / len(columns) for key in columns[0]}


def _tuples(vectors, rows, texts, *, similarity):
    """Retrieval of the positives of tuples.

    texts: the text of each row of `vectors`; rows with the same text have different prompts.
    """
    answers = defaultdict(set)
    corpus = list(dict.fromkeys(row for column in rows[1:] for row in column))
    position = {row: index for index, row in enumerate(corpus)}
    for anchor, positive in zip(rows[0], rows[1], strict=True):
        answers[anchor].add(position[positive])
    queries = list(answers)
    # A query that is also in the corpus is left out of its own results, whatever the prompts.
    position_of = {texts[row]: index for row, index in position.items()}
    itself = [position_of.get(texts[query], -1) for query in queries]
    relevant = [
        answers[query] - {index} or answers[query]
        for query, index in zip(queries, itself, strict=True)
    ]
    left_out = [
        index if index not in rows else -1 for index, rows in zip(itself, relevant, strict=True)
    ]
    return metrics.retrieval(
        vectors[queries], vectors[corpus], relevant, left_out=left_out, similarity=similarity
    )


def _labelled_texts(vectors, rows, labels, *, similarity):
    pairs = list(dict.fromkeys(zip(rows, labels, strict=True)))
    groups = defaultdict(set)
    for row, label in pairs:
        groups[label].add(row)
    queries = [(row, label) for row, label in pairs if len(groups[label]) > 1]
    relevant = [groups[label] - {row} for row, label in queries]
    places = [row for row, _ in queries]
    return metrics.retrieval(
        vectors[places], vectors, relevant, left_out=places, similarity=similarity
    )
