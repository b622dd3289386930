"""Predicts the time of a loss on a machine, from its work and four measured ceilings.

    t = c + W / (R F) + s N M / (R E) + b / B + link

    R                  processes with N / R rows each
    W = 2 p N M D      operations of p products of the score matrix (fastsim/benchmark/cases.py);
                       one product less for scores that the engine keeps between two passes
    s N M              exponentials: one for each score in each of s passes
    b = 4 k (N / R + M) D
                       bytes of embeddings moved outside the products, in k = 6 passes over both
                       sides: rows are read, unit rows written and read, gradients written, read
                       and written
    link = 2 (R - 1) / R * 4 M D / L
                       seconds to gather candidates and to scatter their gradients

The ceilings are F operations per second in the library's product, E exponentials per second in a
panel, B bytes per second in a copy, and c seconds of a call with next to no work. All are measured
(`rates_of`), and none is fitted to a loss. L, the bytes per second between processes, is assumed.

The model is a lower bound: small products run below F, and a panel may leave the cache. `errors`
says how far below the measured times it lies.
"""

from dataclasses import dataclass

from fastsim.backends.cpu import sizes
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.measurements import BOTH, Measurements

PASSES_OVER_ROWS = 6
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Rates:
    """Ceilings of one machine, per second; `call` in seconds."""

    product: float  # operations
    exp: float  # exponentials
    copy: float  # bytes
    call: float = 0.0
    link: float = float("inf")  # bytes between processes
    kept: int = 0  # scores that one process keeps between two passes


def rates_of(about, rows, loss="info_nce", link=float("inf")):
    """The measured ceilings in a result file: the fastest of any size, and a call of this loss.

    ValueError if the file has none.
    """
    ceilings = [row for row in rows if row["measure"] == "ceiling"]
    calls = [
        min(row["repeats ms"])
        for row in ceilings
        if row["name"] == "call"
        and row["loss"] == loss
        and row["implementation"].startswith("fastsim ")
    ]
    values = {
        name: max((row[unit] for row in ceilings if row["name"] == name), default=None)
        for name, unit in (("products", "GFLOP/s"), ("exp", "G/s"), ("copy", "GB/s"))
    }
    if None in values.values() or not calls:
        raise ValueError(f"rates: wanted measured ceilings and calls of {loss}, got {values}")
    product, exp, copy = (1e9 * value for value in values.values())
    kept = sizes.KEPT if about["kind"] == "cpu" else 0
    return Rates(product, exp, copy, 1e-3 * min(calls), link, kept)


def seconds(loss, rows, width, rates, *, columns=None, processes=1):
    """Predicted seconds of forward + backward of a tile loss of `processes` processes together."""
    columns = rows if columns is None else columns
    products = CASES[loss].products[1]
    passes = 2 if products == 4 else 1
    scores = rows * columns / processes
    if passes > 1 and processes == 1:
        products -= min(scores, rates.kept) / max(scores, 1)
    sides = (rows / processes + columns) * width
    gathered = 2 * (processes - 1) / processes * FLOAT * columns * width
    return (
        rates.call
        + 2 * products * scores * width / rates.product
        + passes * scores / rates.exp
        + FLOAT * PASSES_OVER_ROWS * sides / rates.copy
        + gathered / rates.link
    )


def errors(about, rows):
    """[(loss, N, D, measured seconds, predicted seconds)] of fastsim's times in a result file."""
    measurements, points = Measurements(about, rows), []
    for loss, name, n, width, which in measurements.times:
        if which == BOTH and CASES[loss].products[1] and name == measurements.ours(loss, n, width):
            predicted = seconds(loss, n, width, rates_of(about, rows, loss))
            points.append(
                (loss, n, width, 1e-3 * measurements.best(loss, name, n, width), predicted)
            )
    return points
