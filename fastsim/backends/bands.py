"""Bands of rows, for torch operations whose results take several times the memory of the rows.

On a CPU a band and the results fit into a cache. On a GPU such a small operation takes less time
than its launch, so the bands are larger there.
"""

# On this many numbers a fast GPU works about as long as a launch takes: 32 MB to read and write,
# 7 us at 4.8 TB/s.
FILLING = 1 << 22


def numbers_of_a_band(device, on_cpu):
    """How many numbers a band has: `on_cpu` on a CPU, at least `FILLING` elsewhere."""
    return on_cpu if device.type == "cpu" else max(on_cpu, FILLING)


def bands(x, on_cpu=1 << 20):
    """The bands of x (N, ...), as slices of its rows."""
    numbers = numbers_of_a_band(x.device, on_cpu)
    tall = max(1, numbers * len(x) // max(1, x.numel()))
    return [slice(top, min(len(x), top + tall)) for top in range(0, len(x), tall)]
