"""The precision of sums and of products.

Sums are in float64 where the device has it, in compensated float32 elsewhere. Products of float32
matrices follow torch's setting.
"""

import torch

WITHOUT_FLOAT64 = {"mps"}  # types of devices
_EXPONENT = 0xFF << 23  # of the bits of a float32
_NAMES = {"tf32": "high", "bf16": "medium"}  # fp32_precision -> as set_float32_matmul_precision


def wide_dtype(device):
    """The type of sums over many terms."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widened(tensor):
    """The tensor in the type of sums."""
    return tensor.to(wide_dtype(tensor.device))


def float32_products(device_type):
    """How torch is to multiply float32 matrices there: "highest", "high" or "medium".

    That is torch.get_float32_matmul_precision(), unless `fp32_precision` of torch.backends was set
    since, which each type of device has for itself, and which its products go by. Of a device with
    more than that name says the getter raises, of one with less it tells nothing.
    """
    try:
        name = torch.get_float32_matmul_precision()
    except RuntimeError:
        name = None
    if name == "highest":
        return name
    of_device = torch.backends.mkldnn if device_type == "cpu" else torch.backends.cuda
    precision = of_device.matmul.fp32_precision
    if name is None:
        return _NAMES.get(precision, "highest")
    return "highest" if precision == "ieee" else name


def power_of_two(x):
    """The largest power of two that is not above |x|, of float32 numbers; 0 of subnormal ones.

    Infinity and NaN become infinity.
    """
    return x.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)


def rounded_off(one, other, total):
    """What rounding has taken from total = one + other, exactly (Knuth, TAOCP 2, 4.2.2, theorem B).

    0 of sums that are not finite.
    """
    part = total - one
    lost = (one - (total - part)) + (other - part)
    return torch.where(lost.isfinite(), lost, 0.0)


def inverse_norms(x):
    """1 / |x| of rows (..., D), 0 where the norm is no normal number of the compute type."""
    compute = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    tiny = torch.finfo(compute).tiny
    if wide_dtype(x.device) == torch.float64:
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        return norm.reciprocal().masked_fill_(norm < tiny, 0.0)
    # The squares of float32 numbers pass its range: the largest is taken out first.
    x = x.to(compute)
    largest = x.abs().amax(-1)
    size = torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(x / size[..., None], dim=-1)
    return torch.where(largest < tiny, 0.0, 1 / norm / size)
