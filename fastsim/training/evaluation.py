"""Evaluation of a model on a data set: the columns decide the metrics."""

from collections import defaultdict

import torch

from fastsim.encoders.names import ModelError
from fastsim.training import metrics

# Format -> the metric that chooses the best model.
PRIMARY = {
    "scored pairs": "spearman_cosine",
    "labelled pairs": "average_precision_cosine",
    "classes": "accuracy",
    "tuples": "ndcg@10",
    "triplets": "triplet_accuracy_cosine",
    "labelled texts": "ndcg@10",
}
PRIMARY_OF_CROSS_ENCODER = {
    "scored pairs": "spearman",
    "labelled pairs": "average_precision",
}


def is_binary(labels):
    """Whether labels are 0 and 1 (or false and true), both there."""
    return {str(label).lower() for label in labels} in ({"0", "1"}, {"false", "true"})


def as_binary(labels):
    """Labels that `is_binary` as 0 and 1."""
    return [int(str(label).lower() in ("1", "true")) for label in labels]


def primary_metric(layout, *, cross_encoder=False, classifier=False):
    """The name of the metric that stands for the quality on this data."""
    if cross_encoder:
        return PRIMARY_OF_CROSS_ENCODER[layout.name]
    if layout.name == "labelled pairs" and classifier:
        return PRIMARY["classes"]
    if layout.negatives:
        return PRIMARY["triplets"]
    return PRIMARY[layout.name]


def metric_names(layout, *, cross_encoder=False, classifier=False):
    """The names of all metrics on this data, before anything is encoded: of two made-up rows."""
    rows, labels = torch.eye(2), [0, 1]
    if cross_encoder:
        scored = layout.name == "scored pairs"
        return list((metrics.correlations if scored else metrics.binary)(labels, labels))
    if layout.name == "scored pairs":
        return list(metrics.pair_correlations(rows, rows, labels))
    if layout.name == "labelled pairs":
        found = metrics.classes(rows, labels) if classifier else None
        return list(found or metrics.pair_binary(rows, rows, labels))
    names = metrics.triplets(rows, rows, rows) if layout.negatives else {}
    return [*names, *metrics.retrieval(rows, rows, [{0}, {1}])]


def check_evaluation(dataset, layout, *, cross_encoder=False, classes=None, name="data"):
    """Refuse data that the model has no metric for, before anything is encoded.

    name: of the option that the data came by, for the message.
    """
    if cross_encoder and layout.name not in PRIMARY_OF_CROSS_ENCODER:
        wanted = " or ".join(PRIMARY_OF_CROSS_ENCODER)
        raise ValueError(f"{name}: a cross-encoder is evaluated on {wanted}, got {layout.name}")
    if layout.name == "scored pairs" and len(set(dataset[layout.label][:])) < 2:
        raise ValueError(
            f"{name}: wanted at least two different scores, got"
            f" {dataset[layout.label][0]:g} in every row"
        )
    if layout.name == "labelled pairs":
        labels = dataset[layout.label][:]
        if classes is None and not is_binary(labels):
            found = sorted({str(label) for label in labels})[:5]
            raise ValueError(
                f"{name}: wanted labels 0 and 1, both there, or a model trained with loss"
                f" classification, got {', '.join(found)}"
            )
        unknown = sorted(set(labels) - set(classes or labels))
        if unknown:
            raise ValueError(
                f"{name}: wanted classes that the model was trained on, {', '.join(classes)},"
                f" got {unknown[0]!r}"
            )
    if layout.name == "labelled texts":
        pairs = set(
            zip(*(dataset[column][:] for column in (layout.texts[0], layout.label)), strict=True)
        )
        if len({label for _, label in pairs}) == len(pairs):
            raise ValueError(f"{name}: wanted a label with two different texts, got none")


def check_vectors(vectors):
    """ModelError where an encoder gives embeddings that are not finite."""
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

    Scored pairs: Pearson and Spearman under cosine, dot, Euclidean and Manhattan similarity.
    Labelled pairs: with `classifier` (module, class names) accuracy and macro F1; otherwise, for
    labels 0 and 1, accuracy and F1 at the best threshold, and average precision.
    Tuples: triplet accuracy where there are negatives, and retrieval of the positives among all
    positives and negatives.
    Labelled texts: retrieval of the texts of the same label.

    width: how many numbers of each embedding count; None: all that `encode` gives, or the whole
    embedding for a classifier. ValueError for data without a metric.
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
    place = {key: row for row, key in enumerate(unique)}
    rows = [
        [place[prompt, text] for text in column]
        for prompt, column in zip(prompts, columns, strict=True)
    ]
    parts = [vectors[column] for column in rows]
    if layout.name == "scored pairs":
        return metrics.pair_correlations(*parts, dataset[layout.label][:])
    if layout.name == "labelled pairs":
        labels = dataset[layout.label][:]
        if classifier is None:
            return metrics.pair_binary(*parts, as_binary(labels))
        module, classes = classifier
        with torch.no_grad():
            device = next(module.parameters()).device
            logits = module.logits(parts[0].to(device), parts[1].to(device)).cpu()
        return metrics.classes(logits, [classes.index(label) for label in labels])
    if layout.name == "tuples":
        return _tuples(vectors, rows, parts, layout, [text for _, text in unique])
    return _labelled_texts(vectors, rows[0], dataset[layout.label][:])


def _encode(encoder, unique, **options):
    """Embeddings of (prompt, text), each prompt in batches of its own."""
    found = None
    for prompt in dict.fromkeys(prompt for prompt, _ in unique):
        rows = [row for row, (own, _) in enumerate(unique) if own == prompt]
        vectors = encoder.encode([unique[row][1] for row in rows], prompt=prompt, **options)
        if found is None:
            found = torch.empty(len(unique), vectors.shape[1])
        found[rows] = vectors
    return found


def evaluate_cross_encoder(model, dataset, layout, *, batch_size=32, progress=False):
    """Metrics of a `CrossEncoder`: correlations for scored pairs, `metrics.binary` for labels."""
    check_evaluation(dataset, layout, cross_encoder=True)
    texts = [dataset[name][:] for name in layout.texts]
    scores = model.score(*texts, batch_size=batch_size, progress=progress).tolist()
    labels = dataset[layout.label][:]
    if layout.name == "scored pairs":
        return metrics.correlations(scores, labels)
    return metrics.binary(scores, as_binary(labels))


def _tuples(vectors, rows, parts, layout, texts):
    """texts: of each row of `vectors`; two rows of one text have different prompts."""
    result = {}
    if layout.negatives:
        found = [metrics.triplets(parts[0], parts[1], negative) for negative in parts[2:]]
        result = {key: sum(one[key] for one in found) / len(found) for key in found[0]}
    answers = defaultdict(set)
    corpus = list(dict.fromkeys(row for column in rows[1:] for row in column))
    position = {row: index for index, row in enumerate(corpus)}
    for anchor, positive in zip(rows[0], rows[1], strict=True):
        answers[anchor].add(position[positive])
    queries = list(answers)
    # A text can be a query and in the corpus: it is no answer to itself, whatever its prompts.
    place_of = {texts[row]: index for row, index in position.items()}
    own = [place_of.get(texts[query], -1) for query in queries]
    relevant = [
        answers[query] - {row} or answers[query] for query, row in zip(queries, own, strict=True)
    ]
    own = [row if row not in wanted else -1 for row, wanted in zip(own, relevant, strict=True)]
    return result | metrics.retrieval(vectors[queries], vectors[corpus], relevant, left_out=own)


def _labelled_texts(vectors, rows, labels):
    pairs = list(dict.fromkeys(zip(rows, labels, strict=True)))
    groups = defaultdict(set)
    for row, label in pairs:
        groups[label].add(row)
    queries = [(row, label) for row, label in pairs if len(groups[label]) > 1]
    relevant = [groups[label] - {row} for row, label in queries]
    places = [row for row, _ in queries]
    return metrics.retrieval(vectors[places], vectors, relevant, left_out=places)
