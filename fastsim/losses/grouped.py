"""The shared part of losses over groups, in which a row's positives are the columns of its group.

Rows are the embeddings. Columns are the references; without references the embeddings again, but a
row is not compared with itself.
"""

from fastsim.backends import get, pick
from fastsim.backends.extras import extras_of
from fastsim.checks import check_reduction, check_similarity
from fastsim.distributed import join
from fastsim.engine.autograd import tile_loss
from fastsim.pairs import global_groups, groups_of_scores, parse_groups
from fastsim.reduce import as_float, reduce
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss


def grouped_loss(
    loss,
    embeddings,
    groups,
    references,
    reference_groups,
    *,
    own_first,
    kind,
    scale,
    formula,
    options,
    count=None,
    similarity="cosine",
    reduction,
    group,
    backend,
    **parameters,
):
    """The loss named `loss`. The arguments not listed here are those of `sup_con`.

    kind, scale, parameters: fields of the `TileLoss`.
    formula: (scores (N, M), pairs) -> losses (N,) in plain torch.
    options: the options that have to be the same on every rank.
    count: (pairs, backend) -> the number () that the mean divides by; None: the number of rows.
    """
    pairs = parse_groups(
        embeddings, groups, references, reference_groups, own_first, empty=group is not None
    )
    check_reduction(reduction)
    check_similarity(similarity)
    extras = extras_of(similarity=similarity, group=group)
    tensors = embeddings, groups, references, reference_groups, *options.values()
    chosen = pick(backend, *tensors, kind=kind, group=group, extras=extras)
    columns = embeddings if references is None else references
    batch = join(
        group,
        loss,
        embeddings,
        columns,
        references=references,
        own_first=own_first,
        **options,
        similarity=similarity,
        reduction=reduction,
        backend=chosen.name,
    )
    pairs = global_groups(pairs, batch)
    counted = count(pairs, chosen) if count is not None and reduction == "mean" else None
    if chosen.name == "eager":
        scores = dense_scores(embeddings, batch.gather_columns(columns), chosen, similarity)
        return batch.reduce(formula(scores, pairs), reduction, counted)

    def formula_of_scale(scores, scale, _):
        # Among the parameters of losses over groups only a temperature can be learnt.
        learnt = {"temperature": 1 / scale} if "temperature" in options else {}
        return formula(scores, pairs, **learnt)

    return tile_loss(
        TileLoss(kind, pairs, cosine=similarity == "cosine", **parameters),
        embeddings,
        columns,
        scale=scale,
        weights=batch.row_weights(reduction, embeddings, counted),
        batch=batch,
        formula=formula_of_scale,
        backend=chosen,
        summed=True,
    )


def grouped_from_scores(
    scores, groups, reference_groups, *, own_first, formula, count=None, reduction
):
    """The specification of a loss over groups for scores (N, M); the rest as in `grouped_loss`."""
    pairs = groups_of_scores(scores, groups, reference_groups, own_first)
    check_reduction(reduction)
    losses = formula(as_float(scores), pairs)
    return reduce(losses, reduction, None if count is None else count(pairs, get("eager")))
