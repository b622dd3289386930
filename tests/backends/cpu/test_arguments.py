"""The operators refuse an argument of the wrong size, dtype or value with a sentence that names it,
and serve sizes of zero. Nothing else would: a kernel reads and writes where it is told to.

`CALLS` has for each operator arguments that it takes. From these come calls with one tensor too
short, and with one of a dtype that no operator has.
"""

import copy
import resource

import pytest
import torch

from fastsim.backends.cpu import amx
from fastsim.batch_metrics import ROW_METRICS
from tests.backends.cpu import operator_calls
from tests.backends.cpu.operator_calls import (
    CALLS,
    COMMON,
    WIDTHS,
    D,
    K,
    M,
    N,
    doubles,
    floats,
    run,
)

# Those whose size says how large the others are: an error names one of these.
SAY_SIZES = {"x", "panel", "panels", "anchors", "scores", "values", "right", "y", "from", "among"}
# No one knows how many of these there should be, or one less does too.
FREE = {
    *{("equal_counts", "among"), ("batch_totals", "row_metrics"), ("further", "references")},
    *{("chosen_rows", "y"), ("pack_panels", "y")},
    *{(name, "panel") for name in CALLS if name.startswith("mirrored_")},
}
# What an error names in the place of another.
NAMED = {
    ("chosen_rows", "columns"): "values",
    ("chosen_rows_backward", "columns"): "values",
    ("prefix_rows_backward", "grad"): "x",
}


def shorter(value):
    return value[:-1].clone() if value.dim() else value.new_empty(0)


TENSORS = [
    (name, argument)
    for name, make in CALLS.items()
    for argument, value in make().items()
    if isinstance(value, torch.Tensor)
]


def wanted(argument):
    return "fastsim: " if argument in SAY_SIZES else rf"fastsim: {argument}\b.*: wanted .*, got "


@pytest.mark.parametrize("name", CALLS)
def test_the_arguments_of_the_table_are_taken(name):
    run(name)


@pytest.mark.parametrize(("name", "argument"), sorted({*TENSORS} - FREE))
def test_a_tensor_that_is_too_short(name, argument):
    with pytest.raises(RuntimeError, match=wanted(NAMED.get((name, argument), argument))):
        run(name, **{argument: shorter(CALLS[name]()[argument])})


@pytest.mark.parametrize(("name", "argument"), sorted(TENSORS))
def test_a_tensor_of_another_dtype(name, argument):
    value = CALLS[name]()[argument].to(torch.complex64)
    with pytest.raises(RuntimeError, match="fastsim: "):
        run(name, **{argument: value})


def winners(document, place, shape=(3, N)):
    """Winners of late interaction, one of which is another token."""
    places = torch.zeros(shape, dtype=torch.int16)
    places[document, 1] = place
    return {"winners": places}


# Two documents for each query in the place of three for all.
OWN = {"own": True, "y_starts": torch.tensor([0, 3, 5, 6, M]), "grad": floats(2, 2)}
# One document of more tokens than int16 has numbers for.
LONG = {
    **{"x": floats(N, 1), "y": floats(32769, 1), "y_starts": torch.tensor([0, 32769])},
    **{"y_mask": None, "winners": torch.zeros(1, N, dtype=torch.int16)},
}
NO_GROUPS = {"row_groups": None, "column_groups": None}
# What is left of a loss whose directions have sections with scores of two rows each.
SQUARE = {
    "query_to_query": True,
    **dict.fromkeys(("row_ids", "column_ids", "guide_rows", "guide_columns")),
    **dict.fromkeys(("column_bias", "row_shift")),
}
NO_COLUMNS = {
    "panel": floats(N, 0),
    **dict.fromkeys(("column_ids", "column_groups"), torch.zeros(0).long()),
}

VALUES = [
    ("in_one_call", {"tall": 0}, "tall: wanted rows of a band, got 0"),
    (
        "in_one_call",
        {"positives": torch.full((N,), M)},
        f"positives: wanted columns from 0 to {M - 1}",
    ),
    (
        "in_one_call",
        {"positives": torch.full((N,), -1)},
        f"positives: wanted .* to {M - 1}, got -1",
    ),
    ("in_one_call", {"kind": "circle"} | NO_GROUPS, "wanted row_groups"),
    ("in_one_call", {"column_ids": None}, "row_ids, column_ids: wanted both or neither"),
    ("in_one_call", {"y": None, "totals": None}, "wanted"),
    ("full_triplet", {"positives": torch.full((N,), 10**6)}, "positives: wanted .* got 1000000"),
    ("full_triplet", {"parts": 1, "total": doubles()}, "parts: wanted 0 for .* float64, got 1"),
    ("margins", {"positives": None}, "margins: wanted positives"),
    ("margins", NO_COLUMNS, "positives: wanted columns from 0 to -1, got 0"),
    ("triplet", NO_COLUMNS, "positives: wanted columns from 0 to -1, got 0"),
    ("hardest", NO_COLUMNS | NO_GROUPS | {"offsets": floats(0)}, "hardest: wanted row_groups"),
    ("margins", {"positives": torch.full((N,), M)}, "positives: wanted columns from 0"),
    ("triplet", {"positives": torch.full((N,), -1)}, "positives: wanted columns from 0"),
    ("sigmoid", NO_GROUPS, "sigmoid: wanted row_groups or dense"),
    ("circle_forward", NO_GROUPS, "wanted row_groups"),
    ("top_k", {"k": 3}, "values: wanted"),
    ("levels_score_grad", {"values": floats(0)}, "values: wanted 1 to .* levels"),
    ("softmax_forward", {"dense": floats(N, M - 1)}, "dense: wanted"),
    ("max_sim", {"x_starts": torch.tensor([0, 2, 640])}, "x_starts: wanted ascending .* got 640"),
    ("max_sim", {"y_starts": torch.tensor([0, 5, 3, M])}, "y_starts: wanted ascending .* got 3"),
    ("max_sim", {"x_starts": torch.tensor([1, 2, N])}, "x_starts: wanted .* 0 to 6, got 1 to 6"),
    ("max_sim", {"y_starts": torch.tensor([0, 3, 5, 7])}, "y_starts: wanted .* to 8, got 0 to 7"),
    ("max_sim", {"parts": 4}, "parts: wanted 0, or up to 3"),
    ("max_sim", {"parts": 1, "scores": doubles(2, 3)}, "parts: wanted 0, .* float32 scores"),
    ("max_sim", LONG | {"parts": 0, "scores": floats(2, 1)}, "winners: wanted Int for .* 32769"),
    ("max_sim_backward", LONG | {"grad": floats(2, 1)}, "winners: wanted Int for .* 32769"),
    ("max_sim_backward", winners(1, 2), "winners: wanted .* 1 from -1 to 1, got 0 to 2"),
    ("max_sim_backward", winners(2, -2), "winners: wanted .* 2 from -1 to 2, got -2 to 0"),
    ("max_sim_backward", OWN | winners(1, 2, (2, N)), "winners: wanted .* 1 .* 1, got 0 to 2"),
    ("further", {"tall": 0}, "tall: wanted rows of a band, got 0"),
    ("further", {"positives": None}, "positives: wanted those of all rows, got None"),
    ("further", {"kind": "sigmoid"}, "kind: wanted a softmax of rows, without prefixes"),
    (
        "further",
        {"factor_rows": floats(N, 3), "factor_columns": floats(M, 3)},
        "factor_rows, dense: wanted neither",
    ),
    ("further", {"dense": floats(N, M)}, "factor_rows, dense: wanted neither"),
    (
        "further",
        {"row_groups": torch.arange(N), "column_groups": torch.arange(M)},
        "row_groups: wanted None beside further candidates",
    ),
    ("further", {"grad_x": None}, "grad_x, grad_y: wanted both for the derivative by scale"),
    ("further", {"doc_to_doc": True}, "row_ids, .*: wanted none of them with these directions"),
    ("further", SQUARE | {"grad_y": None}, "grad_x, grad_y: wanted both for the derivative"),
    ("further", SQUARE | {"tall": N - 1}, "tall: wanted all 6 rows of a loss .*, got 5"),
    (
        "further",
        SQUARE | {"positives": torch.arange(N).flip(0)},
        "positives: wanted column 0 of row 0 with these directions, got 5",
    ),
    ("chosen_rows", {"columns": torch.full((K, N), M)}, "columns: wanted rows of y"),
    ("cosent", {"scores": floats(N).half()}, "scores: wanted float32 or float64, got .* Half"),
    ("cosent", {"score_grad": doubles(N)}, "score_grad: wanted .* Float, got .* Double"),
    ("cosent", {"labels": floats(N).half()}, "labels: wanted integers, float32 .*, got .* Half"),
    ("unit_rows", {"unit": floats(D, N).t()}, "unit: wanted .* not contiguous"),
    ("packed_scores", {"packed": doubles(64, D)}, "packed: wanted"),
    ("sweep_sigmoid", {"y": [floats(M, D), floats(M, D + 1)]}, "wanted the widths of x"),
    ("sweep_sigmoid", {"x": [floats(N, D)]}, "x: wanted rows of each of 2 widths, got 1"),
    (
        "sweep_sigmoid",
        {"row_metrics": doubles(N, len(ROW_METRICS))},
        "row_metrics: wanted none in a sweep",
    ),
    ("mirrored_sigmoid", {"row_metrics": doubles(N, len(ROW_METRICS))}, "row_metrics: wanted none"),
    ("mirrored_sigmoid", {"column0": 2}, "row0, column0: wanted a band of 6 rows .* got 1, 2"),
    ("mirrored_sigmoid", {"row0": 0, "column0": 1}, "row0, column0: .* got 0, 1"),
    ("mirrored_sigmoid", {"row0": -1, "column0": -1}, "row0, column0: .* got -1, -1"),
    ("mirrored_sigmoid", {"panel": floats(2, 1)}, "row0, column0: .* on or above the diagonal"),
    ("in_one_call", {"y": None, "grad_y": None, "tall": N - 1}, "tall: wanted all 6 rows"),
]
if "amx_loss" in CALLS:
    SYMMETRIC = CALLS["amx_loss"]()["numbers"]
    SYMMETRIC[10] = 1
    VALUES += [
        ("amx_loss", {"kind": "circle"} | NO_GROUPS, "wanted row_groups"),
        ("amx_loss", {"numbers": SYMMETRIC}, "wanted a loss of whole rows"),
        ("amx_loss", {"positives": torch.full((N,), M)}, "positives: wanted columns from 0"),
        ("max_sim", {"parts": 1, "x": torch.ones(N, D).to(torch.int8)}, "rows: wanted row-major"),
    ]
if amx.name():
    VALUES += [("amx_multiply", {"together": n}, f"together: wanted .* {n}") for n in (0, 100)]


@pytest.mark.parametrize(("name", "changed", "message"), VALUES)
def test_a_value_that_is_none(name, changed, message):
    with pytest.raises(RuntimeError, match=f"fastsim: .*{message}|fastsim: {message}"):
        run(name, **changed)


@pytest.mark.parametrize(("state", "groups"), [("low", torch.arange(N) + M), ("high", None)])
def test_a_row_without_a_partner_has_none(state, groups):
    """Whatever the state was: nothing is looked for that is in no column."""
    given = CALLS["hardest"]()
    given[state] = torch.full((N,), torch.inf if state == "low" else -torch.inf)
    if groups is None:
        given |= {"row_groups": torch.zeros(N).long(), "column_groups": torch.zeros(M).long()}
    else:
        given["row_groups"] = groups
    run("hardest", **given)
    assert (given[f"{state}_index"] == -1).all()


@pytest.mark.parametrize("kernel", ["triplet", "margins"])
def test_a_sweep_over_many_columns_finds_the_positive(kernel, monkeypatch):
    """A kernel that looks at the positive of its row has whole rows, asked for or not."""
    columns = 900
    monkeypatch.setattr(operator_calls, "COLUMNS", columns)
    given = operator_calls.of_sweep(kernel)
    given |= {"positives": torch.full((N,), columns - 1), "row_dots": None, "column_dots": None}
    runs = []
    for whole_rows in (False, True):
        arguments = copy.deepcopy(given) | {"whole_rows": whole_rows}
        operator = getattr(operator_calls.OPERATORS, f"sweep_{kernel}").default
        operator(*(arguments[a.name] for a in operator_calls.schema(f"sweep_{kernel}")))
        runs.append([*arguments["grad_x"], *arguments["grad_y"]])
    assert all(map(torch.equal, *runs))


def test_a_derivative_by_scale_that_nobody_asks_for_is_zero():
    """The others are as ever."""
    given, outputs = CALLS["in_one_call"](), ("grad_x", "grad_y", "total", "parameters")
    found = []
    for asked in (1, 0):
        written = {name: torch.full_like(given[name], torch.nan) for name in outputs}
        run("in_one_call", **given | written | {"numbers": [*given["numbers"][:-1], asked]})
        found.append(written)
    wanted, unwanted = found
    assert wanted["parameters"][0] != 0
    assert unwanted["parameters"][0] == 0
    unwanted["parameters"][0] = wanted["parameters"][0]
    assert all(torch.equal(wanted[name], unwanted[name]) for name in outputs)


# Gradients that come in a dtype of their own.
GRADIENTS = [
    (name, argument)
    for name in ("unit_rows_backward", "paired_cosines_backward", "max_sim_backward")
    for argument in CALLS[name]()
    if argument in ("grad_x", "grad_y") or (name, argument) == ("unit_rows_backward", "grad")
]
GRADIENTS += [
    ("triplet_distances_backward", f"grad_{side}") for side in ("anchors", "positives", "negatives")
]


def computed_in(compute, name):
    """The arguments of an operator, of which those of float32 are of another dtype."""
    return {
        argument: value.to(compute)
        for argument, value in CALLS[name]().items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32
    }


@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        (torch.float32, torch.int8),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float64, torch.int64),
    ],
)
@pytest.mark.parametrize(("name", "argument"), GRADIENTS)
def test_a_gradient_of_a_dtype_that_no_kernel_writes(name, argument, compute, dtype):
    given = computed_in(compute, name)
    given[argument] = given[argument].to(dtype)
    message = f"fastsim: {argument}: wanted (Float|Double), Half or BFloat16, got"
    with pytest.raises(RuntimeError, match=message):
        run(name, **given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "argument"), GRADIENTS)
def test_a_gradient_of_16_bits_is_that_of_the_compute_type_rounded(name, argument, compute, dtype):
    given = computed_in(compute, name)
    run(name, **given)
    exact, rounded = given[argument], torch.full_like(given[argument], torch.nan, dtype=dtype)
    run(name, **given | {argument: rounded})
    kind = torch.finfo(dtype)
    assert ((rounded - exact).abs() <= kind.eps * (exact.abs() + kind.tiny)).all()


def none(*shape):
    return torch.full(shape, torch.nan)


# Operators of a size of zero: what is written, and what that is then.
# What the losses of two sides have of rows, where there are none.
NO_ROWS = dict.fromkeys(
    (*COMMON, "row_metrics", "row_shift", "positive_weights", "weights", "prior")
)
NO_ROWS |= dict.fromkeys(("guide_rows", "guide_columns", "factor_rows", "factor_columns", "totals"))

EMPTY = [
    ("scores", {"x": floats(N, 0), "y": floats(M, 0), "panel": none(N, M)}, "panel"),
    ("scores", {"x": floats(0, D), "panel": none(0, M)}, "panel"),
    ("multiply", {"panel": none(N, 0), "right": none(0, D), "out": none(N, D)}, "out"),
    (
        "multiply",
        {"panel": none(0, M), "right": none(0, D), "out": none(M, D), "transposed": True},
        "out",
    ),
    ("multiply", {"right": none(M, 0), "out": none(N, 0)}, "out"),
    (
        "chosen_rows_backward",
        {
            "grad": none(K, 0),
            "values": None,
            "x": none(0, D),
            "y": None,
            "columns": torch.zeros(K, 0).long(),
            "grad_x": none(0, D),
            "grad_y": None,
        },
        "grad_x",
    ),
    (
        "hardest_pairs",
        {
            "x": none(0, D),
            "groups": torch.zeros(0).long(),
            "indices": torch.zeros(2, 0).long(),
            "distances": none(2, 0),
            "largest": none(),
        },
        "largest",
    ),
    (
        "cosent",
        {"scores": none(0), "labels": none(0), "loss": none().double(), "score_grad": none(0)},
        "loss",
    ),
    (
        "further",
        {
            **NO_ROWS,
            **{"x": none(0, D), "own": none(0, D), "grad_x": none(0, D), "grad_y": none(M, D)},
            **{"grad_own": none(0, D), "total": none(), "positives": torch.zeros(0).long()},
        },
        "grad_y",
    ),
    (
        "in_one_call",
        {
            **NO_ROWS,
            **{"x": none(0, D), "grad_x": none(0, D), "grad_y": none(M, D)},
        },
        "grad_y",
    ),
    ("top_k", {"k": 0, "values": none(N, 0), "indices": torch.zeros(N, 0).long()}, "values"),
    (
        "max_sim",
        {
            **{"y": none(0, D), "y_starts": torch.zeros(1).long(), "y_mask": None},
            **{"scores": none(2, 0), "winners": None},
        },
        "scores",
    ),
]
if "amx_loss" in CALLS:
    nothing = NO_ROWS | {"x": none(0, D)}
    nothing |= {"row_groups": torch.zeros(0).long(), "column_groups": torch.zeros(M).long()}
    written = {"grad_x": none(0, D), "grad_y": none(M, D), "total": none()}
    EMPTY.append(("amx_loss", nothing | written, "grad_y"))
if amx.name():
    given = {"panel": none(N, 0), "right": none(0, D), "kept": None, "out": none(N, D)}
    given |= {name: none(0) for name in ("powers", "rest", "inverse")}
    EMPTY.append(("amx_multiply", given, "out"))


@pytest.mark.parametrize(("name", "changed", "written"), EMPTY)
def test_a_size_of_zero_is_served(name, changed, written):
    changed = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in changed.items()}
    run(name, **changed)
    assert torch.equal(changed[written], torch.zeros_like(changed[written]))


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("softmax_forward", {"panel": floats(4, 4).half()}, "wanted float32 or float64"),
        ("sweep_softmax_forward", {"panels": floats(WIDTHS, 4, 4).half()}, "wanted float32 or"),
        ("sweep_softmax_forward", {"row_metrics": doubles(N)}, "row_metrics: wanted none"),
    ],
)
def test_a_refusal_frees_the_arguments(name, changed, message):
    big = 1 << 22  # bytes of one argument that a refusal would not free

    def refuse(times):
        for _ in range(times):
            with pytest.raises(RuntimeError, match=message):
                run(name, **changed, max=torch.ones(big // 8, dtype=torch.float64))

    refuse(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse(16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * big // 1024
