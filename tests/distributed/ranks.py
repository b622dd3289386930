"""What test_losses.py runs on four processes at once: every case on groups of them.

Each process also has the whole batch and computes the loss of one process itself, so that it knows
what its part has to be.
"""

import contextlib
import functools
import inspect
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import fastsim
from fastsim.backends.cpu import sizes
from fastsim.distributed import Ring
from tests.case_inputs import embeddings, integers
from tests.cases import CASES, Case
from tests.distributed.recorder import order, recording
from tests.seeds import fresh

RANKS = (2, 3, 4)
ROWS, MORE_COLUMNS = (13, 7, 10, 6), (20, 0, 9, 3)  # of each rank
NO_ROWS, MORE_OF_NO_ROWS = (
    (0, 7, 5, 0),
    (4, 2, 0, 0),
)  # a rank without rows, one without columns too
WIDTH = 8
LEARNT = {"temperature": 0.3, "scale": 3.0, "bias": -1.0}


def against(loss):
    """A loss by groups of two sides, its references the second, and the groups of both."""

    def call(x, y, groups, **options):
        return loss(x, groups[0], y, groups[1], **options)

    call.__wrapped__, call.__kwdefaults__ = loss, loss.__kwdefaults__
    return call


def selected(x, groups, references=None, reference_groups=None, **options):
    """A number of every row that tells all of `hardest_pairs`."""
    found = fastsim.hardest_pairs(x, groups, references, reference_groups, **options)
    positive, negative = (d.masked_fill(d.isinf(), 0.0) for d in found[:2])
    return positive + 3 * negative + found.positive_index + 0.3 * found.negative_index


selected.__wrapped__ = fastsim.hardest_pairs
selected.__kwdefaults__ = fastsim.hardest_pairs.__kwdefaults__


def copies(n, d, generator):
    """Rows of which there are few, the same on every rank: which is chosen is told by its place."""
    few = embeddings(5, d, generator=fresh(d))
    return few[integers(5, n, generator=generator)]


def grouped(name, loss, sides=2, points=embeddings, **options):
    """A case of `loss` by groups; with two sides, of the losses `against` references."""

    def make(n, m, d, generator):
        counts = (n, m)[:sides]
        groups = tuple(integers(max(2, n // 3), count, generator=generator) for count in counts)
        tensors = [points(count, d, generator=generator) for count in counts]
        return tensors, [groups if sides == 2 else groups[0]], dict(options)

    return Case(name, against(loss) if sides == 2 else loss, None, make)


REFERENCES = [
    grouped(f"{loss.__name__}-{name}", loss, **options)
    for loss in (fastsim.sup_con, fastsim.nt_xent, fastsim.multi_similarity, fastsim.circle)
    for name, options in (("references", {}), ("own first", {"own_first": True}))
]
SELECTIONS = [
    grouped(f"hardest_pairs-{distance}-{name}", selected, sides, points, distance=distance)
    for distance in ("euclidean", "cosine")
    for name, sides, points in (
        ("alone", 1, embeddings),
        ("references", 2, embeddings),
        ("copies", 1, copies),
    )
]


def _own_negatives(n, m, d, generator):
    sides = [embeddings(count, d, generator=generator) for count in (n, m)]
    return sides, [], {"own_negatives": embeddings(n, 3, d, generator=generator)}


OWN_NEGATIVES = [Case("info_nce-own", fastsim.info_nce, None, _own_negatives)]
WITH_GROUP = [c for c in CASES if "group" in c.loss.__kwdefaults__]
BATCHWISE = WITH_GROUP + REFERENCES + SELECTIONS + OWN_NEGATIVES
# (exchange, backend, dtype). float32, "eager" and "torch" need not be tried with every number of
# processes: what is theirs alone does not know it.
WAYS = {
    2: (("gather", "cpu", torch.float32), ("ring", "cpu", torch.float32)),
    3: (("gather", "eager", torch.float64), ("gather", "torch", torch.float64)),
    4: (("ring", "torch", torch.float64),),
}
ALWAYS = (("gather", "cpu", torch.float64), ("ring", "cpu", torch.float64))
# Losses whose columns do not travel.
GATHERING = (
    fastsim.late_interaction,
    fastsim.losses.batch_all_triplet,
    fastsim.losses.batch_semi_hard_triplet,
)
REDUCTION = {2: "mean", 3: "sum", 4: "none"}


def ways(case, ranks):
    """[(exchange, backend, dtype, reduction, whether a rank has no rows)] of a case."""
    found = [(*way, REDUCTION[ranks], False) for way in ALWAYS + WAYS[ranks]]
    if ranks == 4:
        found += [(*way, "mean", True) for way in (*ALWAYS, *WAYS[3], *WAYS[4])]
        found += [(*way, "none", True) for way in ALWAYS]
    if "reduction" not in case.loss.__kwdefaults__:
        found = list(dict.fromkeys((*way[:3], None, way[4]) for way in found))
    if case.loss in GATHERING:
        found = [way for way in found if way[0] == "gather"]
    # In a library product the scores of copies may differ by rounding.
    return [way for way in found if way[1] == "cpu" or not case.name.endswith("-copies")]


@dataclass
class Part:
    """A call of a loss: embeddings, other arguments, options, and which row or column is whose."""

    tensors: list
    others: list
    options: dict


def parts_of(case, ranks, seed, shrink=1, none=False):
    """One `Part` per rank, the same on every process. none: some rank has no rows."""
    generator = fresh(seed)
    counts = (NO_ROWS, MORE_OF_NO_ROWS) if none else (ROWS, MORE_COLUMNS)
    sizes = [
        (-(-rows // shrink), -(-(rows + more) // shrink))
        for rows, more in list(zip(*counts, strict=True))[:ranks]
    ]
    found = [Part(*case.make(*size, WIDTH, generator)) for size in sizes]
    if len(found[0].others) == 1 and found[0].others[0] is not None:
        everything = case.make(*map(sum, zip(*sizes, strict=True)), WIDTH, generator)[1][0]
        if isinstance(everything, torch.Tensor) and everything.dim() == 2:
            # A target matrix has the rank's rows and the columns of all.
            for part, rows in zip(found, everything.split([n for n, _ in sizes]), strict=True):
                part.others[0] = rows
    return found


def whole_of(case, parts):
    """The `Part` of one process that has everything, and the order it has put the columns in."""
    sides = [joined(column) for column in zip(*(part.tensors for part in parts), strict=True)]
    counts = [[len(t) for t in part.tensors if t is not None] for part in parts]
    starts = [sum(count[-1] for count in counts[:rank]) for rank in range(len(parts))]
    options = dict(parts[0].options)
    for name in {"exclude", "guide"} & {*options}:
        pairs = zip(*(part.options[name] for part in parts), strict=True)
        options[name] = tuple(map(torch.cat, pairs))
    of_rows = {"query_mask", "document_mask", "candidate_bias", "own_negatives", "tau_plus"}
    for name in of_rows & {*options}:
        options[name] = torch.cat([part.options[name] for part in parts])
    others, order = [], None
    own = [torch.arange(len(part.tensors[0])) for part in parts]
    if case.loss is fastsim.full_triplet or "own_first" in options:
        # The columns of the rows come first.
        own = torch.cat([columns + start for columns, start in zip(own, starts, strict=True)])
        rest = [j for j in range(len(sides[1])) if j not in own.tolist()]
        order = torch.cat([own, torch.tensor(rest, dtype=torch.long)])
        sides[1] = sides[1][order]
        if "exclude" in options:
            options["exclude"] = (options["exclude"][0], options["exclude"][1][order])
    if "candidates" in inspect.signature(case.loss).parameters:
        places = [
            (part.others[0] if part.others else columns) + start
            for part, columns, start in zip(parts, own, starts, strict=True)
        ]
        others = [torch.cat(places)]
    elif case.loss is fastsim.distill:
        others = [torch.cat(side) for side in zip(*(part.others for part in parts), strict=True)]
        if options.get("kind") == "margin_mse":
            places = [
                part.options.get("positives", columns) + start
                for part, columns, start in zip(parts, own, starts, strict=True)
            ]
            options["positives"] = torch.cat(places)
    elif case.loss is fastsim.late_interaction:
        places = [columns + start for columns, start in zip(own, starts, strict=True)]
        options["positives"] = torch.cat(places)
    elif case.loss is not fastsim.full_triplet:
        targets = [part.others[0] if part.others else None for part in parts]
        if targets[0] is None:  # the diagonal: a group of its own for every row
            rows = [torch.arange(n) + s for (n, *_), s in zip(counts, starts, strict=True)]
            others = [(torch.cat(rows), torch.arange(len(sides[-1])))]
        elif isinstance(targets[0], tuple):
            of_rows, of_columns = map(torch.cat, zip(*targets, strict=True))
            others = [(of_rows, of_columns if order is None else of_columns[order])]
        else:
            others = [torch.cat(targets)]
    return Part(sides, others, options), order


def joined(tensors):
    return None if tensors[0] is None else torch.cat(tensors)


def run(case, part, dtype, reduction, **extra):
    """(value, gradients of embeddings, gradients of the learnt numbers)."""
    options = part.options | extra
    if "own_negatives" in options:
        options["own_negatives"] = options["own_negatives"].to(dtype)
    learnt = {}
    for name, value in LEARNT.items():
        if case.loss.__kwdefaults__.get(name) is not None:
            learnt[name] = torch.tensor(value, dtype=dtype, requires_grad=True)
    leaves = [t if t is None else t.to(dtype).requires_grad_() for t in part.tensors]
    if reduction:
        options["reduction"] = reduction
    value = case.loss(*leaves, *part.others, **(options | learnt))
    if value.dim():
        (value * (1 + value.detach().cos())).sum().backward()  # another weight for every row
    else:
        value.backward()
    sides = [t.grad for t in leaves if t is not None]
    return value.detach(), sides, [number.grad for number in learnt.values()]


@functools.lru_cache(maxsize=16)  # of a case on some ranks: the ways of exchange have it in common
def truth_of(case, ranks, seed, small, none, dtype, reduction):
    """What `run` finds on one process that has everything, columns in the order of the ranks."""
    whole, order = whole_of(case, parts_of(case, ranks, seed, shrink=3 if small else 1, none=none))
    truth, sides, numbers = run(case, whole, dtype, reduction, backend="cpu")
    if order is not None:
        sides[1] = sides[1][order.argsort()]
    return truth, sides, numbers


def compare(case, group, way, seed):
    """The largest relative error of value and gradients on this rank."""
    exchange, backend, dtype, reduction, none = way
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = parts_of(case, ranks, seed, shrink=3 if backend == "eager" else 1, none=none)
    truth, sides, numbers = truth_of(case, ranks, seed, backend == "eager", none, dtype, reduction)
    chosen = Ring(group) if exchange == "ring" else group
    got, own_sides, own_numbers = run(
        case, parts[rank], dtype, reduction, backend=backend, group=chosen
    )
    of_rows = truth.dim() == 1
    share = 1 if of_rows or reduction == "sum" else ranks  # as DDP averages
    errors = []
    for mine, all_of_it, number in zip(own_sides, sides, range(2), strict=False):
        counts = [len([t for t in part.tensors if t is not None][number]) for part in parts]
        errors.append(relative(mine / share, all_of_it.split(counts)[rank], all_of_it))
    summed = [got.clone(), *own_numbers]
    if of_rows:
        errors.append(relative(got, truth.split([len(p.tensors[0]) for p in parts])[rank], truth))
        summed = own_numbers
    wanted = numbers if of_rows else [truth, *numbers]
    for mine, one in zip(summed, wanted, strict=True):
        dist.all_reduce(mine, group=group)
        # A sum of both signs may be anything; what it is a sum of is as large as the loss.
        errors.append(relative(mine / share, one, one.abs() + truth.abs().mean()))
    return max(errors)


def of_others(group, seed):
    """{(case, exchange): error} of a group whose ranks are not those of all processes."""
    return {
        (case.name, exchange): compare(
            case, group, (exchange, "cpu", torch.float64, "mean", False), seed
        )
        for case in BATCHWISE
        if case.name in ("info_nce-everything", "siglip-soft", "full_triplet-exclude")
        for exchange in ("gather", "ring")
    }


def of_other_lengths(group, seed):
    """The error where the longest document has another length on every rank; group: or None."""
    if group is None:
        return None
    generator, rank = fresh(seed), dist.get_rank(group)
    lengths = [5, 3, 9, 4][: dist.get_world_size(group)]
    queries = [embeddings(4, 3, WIDTH, generator=generator).double() for _ in lengths]
    documents = [embeddings(4, n, WIDTH, generator=generator).double() for n in lengths]
    padded = torch.zeros(4 * len(lengths), max(lengths), WIDTH, dtype=torch.float64)
    mask = torch.zeros(padded.shape[:2], dtype=torch.bool)
    for number, part in enumerate(documents):
        own = slice(4 * number, 4 * number + 4)
        padded[own, : part.shape[1]], mask[own, : part.shape[1]] = part, True
    options = {"reduction": "sum", "backend": "cpu"}
    padded.requires_grad_(), documents[rank].requires_grad_()
    truth = fastsim.late_interaction(torch.cat(queries), padded, document_mask=mask, **options)
    truth.backward()
    value = fastsim.late_interaction(queries[rank], documents[rank], group=group, **options)
    value.backward()
    wanted = padded.grad[4 * rank : 4 * rank + 4, : lengths[rank]]
    value = value.detach()
    dist.all_reduce(value, group=group)
    return max(
        relative(value, truth.detach(), truth), relative(documents[rank].grad, wanted, padded.grad)
    )


def seen_by(group, seed):
    """{(case, exchange): (error, how many numbers)} of what is seen; group: or None."""
    found = {}
    for case in BATCHWISE if group is not None else []:
        for exchange in sorted({way[0] for way in ways(case, 3) if way[1] == "cpu"}):
            found[case.name, exchange] = seen_error(case, group, exchange, seed)
    return found


def seen_error(case, group, exchange, seed):
    """The largest difference of what the ranks and one process see of the whole batch."""
    parts = parts_of(case, dist.get_world_size(group), seed)
    chosen = Ring(group) if exchange == "ring" else group
    found = []
    for part, extra in (
        (whole_of(case, parts)[0], {}),
        (parts[dist.get_rank(group)], {"group": chosen}),
    ):
        with fastsim.metrics() as seen:
            run(case, part, torch.float64, None, backend="cpu", **extra)
        found.append(seen.read())
    for numbers in found:
        numbers.pop("uniformity", None)  # of other pairs of rows
    one, all_of_them = found
    assert one.keys() == all_of_them.keys()
    return max((abs(one[name] - all_of_them[name]) for name in one), default=0.0), len(one)


def relative(got, wanted, scale):
    assert got.shape == wanted.shape
    assert got.isfinite().all()
    if not got.numel():
        return 0.0
    return ((got - wanted).abs().max() / scale.abs().max().clamp(min=1e-30)).item()


def refusals(group):
    """Error messages of calls whose options differ between the ranks, or that take no ring."""
    rank = dist.get_rank(group)
    x = torch.randn(4, 6 + (rank == 1))
    y = torch.randn(4, 6)
    found = {}
    for name, call in {
        "width": lambda: fastsim.info_nce(x, x, group=group),
        "temperature": lambda: fastsim.info_nce(y, y, temperature=0.1 + rank, group=group),
        "learnt": lambda: fastsim.info_nce(y, y, temperature=torch.tensor(0.1 + rank), group=group),
        "loss": lambda: (fastsim.siglip if rank else fastsim.info_nce)(y, y, group=group),
        "symmetric": lambda: fastsim.info_nce(y, y, symmetric=rank == 0, group=group),
        "dtype": lambda: fastsim.info_nce(
            *[y.to([y.dtype, torch.half][rank % 2])] * 2, group=group
        ),
        "exchange": lambda: fastsim.info_nce(y, y, group=Ring(group) if rank else group),
        "targets": lambda: fastsim.siglip(y, y, None if rank else (ids(), ids()), group=group),
        "exclude": lambda: fastsim.info_nce(
            y, y, exclude=(ids(), ids()) if rank else None, group=group
        ),
        "nt_xent": lambda: fastsim.nt_xent(y, ids(), temperature=0.1 + rank, group=group),
        "multi_similarity": lambda: fastsim.multi_similarity(
            y, ids(), beta=9.0 + rank, group=group
        ),
        "batch_hard_triplet": lambda: fastsim.batch_hard_triplet(
            y, ids(), soft=rank == 0, group=group
        ),
        "hardest_pairs": lambda: fastsim.hardest_pairs(
            y, ids(), distance="cosine" if rank else "euclidean", group=group
        ),
        "references": lambda: fastsim.sup_con(
            y, ids(), *((y, ids()) if rank else (None, None)), group=group
        ),
        "own first": lambda: fastsim.nt_xent(y, ids(), y, ids(), own_first=rank == 0, group=group),
        "largest_group": lambda: fastsim.losses.batch_all_triplet(
            y, ids(), largest_group=5 + rank, group=group
        ),
        "ring of texts": lambda: fastsim.late_interaction(y[None], y[None], group=Ring(group)),
        "ring of triplets": lambda: fastsim.losses.batch_semi_hard_triplet(
            y, ids(), group=Ring(group)
        ),
        "labels": lambda: fastsim.cosent(
            x[:, 0], ids().to([torch.int64, torch.float32][rank % 2]), group=group
        ),
        "levels": lambda: fastsim.cosent_matrix(
            y, y, (ids(), ids()), levels=torch.tensor([-1.0, 1.0]) if rank else None, group=group
        ),
        "gradient": lambda: fastsim.info_nce(y.requires_grad_(rank == 0), y, group=group),
        "gradient of columns": lambda: fastsim.info_nce(
            x[:, :6], x[:, :6].clone().requires_grad_(rank == 0), group=group
        ),
        "no gradients": lambda: without_gradients(rank == 1, y, group),
        "metrics": lambda: watched(rank == 1, y, group),
    }.items():
        try:
            call()
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error)
    y.requires_grad_(False)
    found["after"] = fastsim.info_nce(y, y, group=group).isfinite().item()
    return found


def without_gradients(here, y, group):
    with torch.set_grad_enabled(not here):
        fastsim.info_nce(y, y, group=group)


def watched(here, y, group):
    with fastsim.metrics() if here else contextlib.nullcontext():
        fastsim.info_nce(y, y, group=group)


def ids():
    return torch.arange(4)


def failure(group, seconds):
    """What a call says, and after how long, when another rank does not answer."""
    start = time.monotonic()
    x = torch.randn(4, 6, requires_grad=True)
    try:
        fastsim.info_nce(x, x, group=group).backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def everything(groups, seed):
    """{(case, ranks, *way): error}, and the calls of each, of this rank.

    groups: {ranks: group or None}.
    """
    sizes.PANEL = sizes.BAND = 1 << 9  # so that there are many panels
    sizes.FEWEST_ROWS, sizes.WIDEST = 12, 64
    errors, calls = {}, {}
    for ranks, group in groups.items():
        for case in BATCHWISE if group is not None else []:
            for way in ways(case, ranks):
                key = case.name, ranks, *way
                made = []
                try:
                    with recording(made):
                        errors[key] = compare(case, group, way, seed)
                except RuntimeError as error:
                    raise AssertionError(f"{key}: {error}") from error
                calls[key] = order(made)
    return errors, calls
