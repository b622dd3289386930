"""Arguments that each operator of the CPU library takes."""

import re
from pathlib import Path

import pytest
import torch

import fastsim  # noqa: F401  loads the library
from fastsim.backends.cpu import amx, library

if library.UNAVAILABLE:
    pytest.skip(library.UNAVAILABLE, allow_module_level=True)

OPERATORS = torch.ops.fastsim_cpu
ROWS, COLUMNS, WIDTH, LEVELS, K, WIDTHS = 6, 8, 5, 3, 2, 2
COMMON = {"positives", "row_ids", "column_ids", "row_groups", "column_groups"}
# Fields of kernels over pairs: those of columns; those whose type is the panel's though written.
OF_COLUMNS = {
    "column_top",
    "column_weight",
    "column_sum",
    "column_factor",
    "column_sums",
    "offsets",
}
OF_LEVELS = {"values", "high", "up", "low", "down"}
OUTPUTS = {("closest", "values"), ("hardest", "low"), ("hardest", "high"), ("top_k", "values")}


def floats(*shape, dtype=torch.float32):
    return torch.rand(shape, dtype=dtype) + 0.5


def doubles(*shape):
    return floats(*shape, dtype=torch.float64)


def packed(*shape):
    return torch.zeros(*shape, dtype=torch.int16)


def pairs():
    return {
        "positives": torch.arange(ROWS),
        "row_ids": torch.arange(ROWS),
        "column_ids": torch.arange(COLUMNS) + ROWS,
        "row_groups": torch.arange(ROWS),
        "column_groups": torch.arange(COLUMNS),
        "dense": None,
        "negative_target": 0.0,
        "skip": "nothing",
        "row_metrics": doubles(ROWS, OPERATORS.row_metric_count()),
    }


def schema(name):
    return getattr(OPERATORS, name).default._schema.arguments


def is_tensor(argument):
    return "Tensor" in str(argument.type) and "List" not in str(argument.type)


def field(kernel, argument):
    """A value of a field of a kernel over pairs."""
    name, kind = argument.name, str(argument.type)
    if not is_tensor(argument):
        return {"float": 1.0, "bool": False, "int": K}[kind]
    columns = name in OF_COLUMNS or kernel == "softmax_forward_columns"
    shape = (COLUMNS if columns else ROWS,)
    if kernel.startswith("levels") and name in OF_LEVELS:
        shape = (LEVELS,)
    if name == "partial":
        shape = ROWS, 4, LEVELS
    if kernel == "top_k":
        shape = ROWS, K
    if "ind" in name:
        return torch.full(shape, -1)
    state = argument.alias_info is not None and (kernel, name) not in OUTPUTS
    return floats(*shape, dtype=torch.float64 if state else torch.float32)


def of_kernel(kernel):
    """The arguments of the operator of a kernel over pairs."""
    known = {"panel": floats(ROWS, COLUMNS), "row0": 0, "column0": 0} | pairs()
    known["row_metrics"] = known["row_metrics"] if PAIRS_KERNELS[kernel] == "first_look" else None
    return {a.name: known[a.name] if a.name in known else field(kernel, a) for a in schema(kernel)}


def of_sweep(kernel):
    """The same over the panels of several widths, which are made of their products."""
    given = of_kernel(kernel)
    del given["panel"]
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and name not in {*COMMON, "row_metrics"}:
            given[name] = value.repeat(WIDTHS, 1)
    sides = {
        side: [floats(count, WIDTH) for _ in range(WIDTHS)]
        for side, count in (("x", ROWS), ("y", COLUMNS), ("grad_x", ROWS), ("grad_y", COLUMNS))
    }
    of_sides = {
        f"{side}_{what}": value
        for side, count in (("row", ROWS), ("column", COLUMNS))
        for what, value in (
            ("ratios", floats(WIDTHS - 1, count)),
            ("zeros", torch.zeros(WIDTHS, count, dtype=torch.bool)),
            ("dots", doubles(WIDTHS - 1, count)),
        )
    }
    flags = {"first_rows": True, "first_columns": True, "filled": False, "whole_rows": False}
    return {
        "panels": floats(WIDTHS, 0, 0),
        **of_sides,
        **sides,
        **flags,
        **given,
        "row_metrics": None,
    }


def of_mirrored(kernel):
    """The same over a band of the scores of rows with themselves."""
    of_columns = {"column_ids": torch.arange(ROWS) + ROWS, "column_groups": torch.arange(ROWS)}
    band = {"panel": floats(2, ROWS - 1), "row0": 1, "column0": 1, "count": ROWS}
    given = of_kernel(kernel) | of_columns | band
    return given | {"score_grad": False, "row_metrics": None}


def in_one_call():
    numbers = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, float("inf"), 0.0, 1.0, 0, 0, 1, 0, 0, 1]
    names = ["column_bias", "row_shift", "positive_weights", "weights"]
    sizes = COLUMNS, ROWS, ROWS, ROWS
    given = pairs() | {name: floats(size) for name, size in zip(names, sizes, strict=True)}
    del given["negative_target"]
    return given | {
        "x": floats(ROWS, WIDTH),
        "y": floats(COLUMNS, WIDTH),
        "kind": "sigmoid",
        "numbers": numbers,
        "guide_rows": floats(ROWS, 3),
        "guide_columns": floats(COLUMNS, 3),
        "factor_rows": floats(ROWS, 3),
        "factor_columns": floats(COLUMNS, 3),
        "prior": floats(ROWS, 2),
        "tall": ROWS,
        "kept": 0,
        **_written(),
    }


def amx_loss():
    given = in_one_call() | dict.fromkeys(("parts", "score_grad_parts", "guide_parts"), 3)
    del given["tall"]
    return given | {"factor_parts": 0, "stripe": 8192}


def _written():
    return {
        "grad_x": floats(ROWS, WIDTH),
        "grad_y": floats(COLUMNS, WIDTH),
        "total": floats(),
        "parameters": doubles(2),
        "totals": doubles(OPERATORS.totals()),
    }


def further():
    of_softmax = {"kind": "softmax", "total": floats(ROWS), "row_metrics": None}
    absent = dict.fromkeys(("row_groups", "column_groups", "factor_rows", "factor_columns"))
    given = in_one_call() | of_softmax | absent
    del given["kept"]
    return given | {
        "own": floats(ROWS * K, WIDTH),
        "references": floats(3, WIDTH),
        **dict.fromkeys(("query_to_query", "doc_to_query", "doc_to_doc"), False),
        "grad_own": floats(ROWS * K, WIDTH),
    }


def full_triplet():
    return {
        "x": floats(ROWS, WIDTH),
        "y": floats(COLUMNS, WIDTH),
        "positives": torch.arange(ROWS),
        "row_metrics": None,
        **{"semi_hard": False, "margin": 0.1, "parts": 0, "weights": floats(ROWS), "weight": 1.0},
        **{k: v for k, v in _written().items() if k != "parameters"},
    }


def max_sim(*, back=False):
    given = {
        "x": floats(ROWS, WIDTH),
        "y": floats(COLUMNS, WIDTH),
        "x_starts": torch.tensor([0, 2, ROWS]),
        "y_starts": torch.tensor([0, 3, 5, COLUMNS]),
        "x_mask": torch.ones(ROWS, dtype=torch.bool),
        "y_mask": torch.ones(COLUMNS, dtype=torch.bool),
        "cosine": True,
        "own": False,
        "winners": torch.zeros(3, ROWS, dtype=torch.int16),
    }
    if back:
        grads = {"grad_x": floats(ROWS, WIDTH), "grad_y": floats(COLUMNS, WIDTH)}
        return given | {"grad": floats(2, 3)} | grads
    return given | {"parts": 0, "scores": floats(2, 3)}


def sides(*names, **more):
    return {name: floats(ROWS, WIDTH) for name in names} | more


def group(count):
    return -(-count // OPERATORS.amx_group()) * OPERATORS.amx_group()


SOURCE = Path(__file__).parents[3] / "csrc/cpu/kernels.inc"
# {kernel: how its work is divided}. A kernel of the kind "first_look" records the row metrics too.
PAIRS_KERNELS = dict(re.findall(r"^PAIRS_KERNEL\((\w+), \w+, (\w+)", SOURCE.read_text(), re.M))
N, M, D = ROWS, COLUMNS, WIDTH
CALLS = {
    "pack_panels": lambda: {"y": floats(M, D), "packed": floats(packed_rows(M), D)},
    "packed_scores": lambda: {
        **{"x": floats(N, D), "packed": floats(packed_rows(M), D)},
        **{"panel": floats(N, M), "add": False},
    },
    "scores": lambda: {
        **{"x": floats(N, D), "y": floats(M, D), "inverse": floats(M)},
        **{"panel": floats(N, M), "add": False},
    },
    "multiply": lambda: {
        **{"panel": floats(N, M), "right": floats(M, D), "out": floats(N, D)},
        **{"transposed": False, "add": False},
    },
    "leave_out_above": lambda: {
        **{"panel": floats(N, M), "guide": floats(N, M), "thresholds": floats(N)},
    },
    "unit_rows": lambda: sides("x", "unit", inverse=floats(N)),
    "unit_rows_backward": lambda: sides(
        "grad_unit", "x", "grad", inverse=floats(N), factor=1.0, dots=floats(N)
    ),
    "paired_cosines": lambda: sides("x", "y", cosines=floats(N), inverse=floats(2, N)),
    "paired_squared_errors": lambda: sides("x", "y", targets=floats(N), factor=1.0, total=floats()),
    "paired_cosines_backward": lambda: sides(
        *("x", "y", "grad_x", "grad_y"),
        **{"grad": floats(N), "cosines": floats(N), "inverse": floats(2, N)},
    ),
    "centred": lambda: {
        **{"x": floats(N, D), "y": floats(M, D), "rows": floats(N, D), "columns": floats(M, D)},
        **{"offsets": floats(M), "largest": floats()},
    },
    "hardest_pairs": lambda: {
        **{"x": floats(N, D), "groups": torch.arange(N), "indices": torch.zeros(2, N).long()},
        **{"distances": floats(2, N), "largest": floats()},
    },
    "triplet_distances": lambda: sides(
        *("anchors", "positives", "negatives"),
        **{"margin": 0.1, "factor": 1.0, "near": floats(N), "far": floats(N), "losses": floats(N)},
    ),
    "triplet_distances_backward": lambda: sides(
        *("anchors", "positives", "negatives", "grad_anchors", "grad_positives", "grad_negatives"),
        **{"grad": floats(N), "near": floats(N), "far": floats(N), "margin": 0.1, "factor": 1.0},
    ),
    "chosen_rows": lambda: {
        **{"x": floats(N, D), "y": floats(M, D), "columns": torch.zeros(K, N).long()},
        **{"distances": True, "values": floats(K, N)},
    },
    "chosen_rows_backward": lambda: {
        **{"x": floats(N, D), "y": floats(M, D), "columns": torch.zeros(K, N).long()},
        **{"grad": floats(K, N), "values": floats(K, N)},
        **{"grad_x": floats(N, D), "grad_y": floats(M, D)},
    },
    "prefix_rows": lambda: sides("x", "out", norms=doubles(N)),
    "prefix_rows_dots": lambda: sides("grad_rows", "x", inverse=doubles(N), dots=doubles(N)),
    "prefix_rows_backward": lambda: sides(
        "grad_rows", "x", "grad", along=doubles(N), inverse=doubles(N)
    ),
    "equal_counts": lambda: {
        **{"values": torch.arange(N), "among": torch.arange(M), "counts": torch.arange(N)},
    },
    "batch_totals": lambda: {
        **{
            "row_metrics": doubles(N, OPERATORS.row_metric_count()),
            "total": doubles(OPERATORS.totals()),
        },
        **{"x": None, "y": None},
    },
    "cosent": lambda: {
        **{"scores": floats(N), "labels": floats(N), "scale": 20.0},
        **{"loss": doubles(), "score_grad": floats(N)},
    },
    "in_one_call": in_one_call,
    "further": further,
    "full_triplet": full_triplet,
    "max_sim": max_sim,
    "max_sim_backward": lambda: max_sim(back=True),
    **{name: lambda name=name: of_kernel(name) for name in PAIRS_KERNELS},
    **{
        f"sweep_{name}": lambda name=name: of_sweep(name)
        for name in ("softmax_forward", "sigmoid", "softmax_both_score_grad")
    },
    **{
        f"mirrored_{name}": lambda name=name: of_mirrored(name)
        for name in ("softmax_forward", "sigmoid", "circle_score_grad")
    },
}
if amx.name():
    CALLS |= {
        "amx_norms": lambda: sides("x", inverse=floats(N), powers=floats(N), rest=floats(N)),
        "amx_pack": lambda: {
            **{"y": floats(M, D), "powers": floats(M), "packed": packed(group(M), group(D))},
        },
        "amx_scores": lambda: {
            **{"x": floats(N, D), "powers": floats(N), "rest": floats(N), "add": False},
            **{"packed": packed(group(M), group(D)), "column_rest": floats(M)},
            "panel": floats(N, M),
        },
        "amx_pack_right": lambda: {
            **{"right": floats(M, D), "powers": floats(M), "parts": 1},
            "packed": packed(OPERATORS.amx_right_size(M, D, 1)),
        },
        "amx_multiply": lambda: {
            **{"panel": floats(N, M), "right": floats(M, D), "powers": floats(M)},
            **{"kept": packed(OPERATORS.amx_right_size(M, D, 1)), "rest": floats(M)},
            **{"inverse": floats(M), "out": floats(N, D), "transposed": False, "add": False},
            **{"panel_parts": 1, "parts": 1, "together": 64},
        },
    }
if amx.is_matrix_unit():
    CALLS["amx_loss"] = amx_loss


def packed_rows(count):
    columns = OPERATORS.panel_columns(True)
    return -(-count // columns) * columns


def run(name, **changed):
    arguments = CALLS[name]() | changed
    positional = [arguments[a.name] for a in schema(name)]  # `from` is no keyword
    return getattr(OPERATORS, name).default(*positional)
