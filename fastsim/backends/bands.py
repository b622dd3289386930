"""Rows a band at a time, where what torch makes of them takes several times their memory.

On a CPU a band and what is made of it fit a cache. A GPU takes longer to launch an operation on so
few numbers than to do it, so its bands are larger.
"""

# Numbers that a fast GPU works on about as long as the next launch takes: 32 MB to read and write,
# which takes 7 us at 4.8 TB/s.
FILLING = 1 << 22


def numbers_of_a_band(device, on_cpu):
    """How many numbers a band has on a device, which on a CPU are `on_cpu`."""
    return on_cpu if device.type == "cpu" else max(on_cpu, FILLING)


def bands(x, on_cpu=1 << 20):
    """The slices of rows of x (N, ...) that are its bands."""
    numbers = numbers_of_a_band(x.device, on_cpu)
    tall = max(1, numbers * len(x) // max(1, x.numel()))
    return [slice(top, min(len(x), top + tall)) for top in range(0, len(x), tall)]
