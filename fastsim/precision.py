"""The precision of sums and of products.

Sums are in float64 if the device has it, otherwise in compensated float32. Products of float32
matrices follow torch's setting.
"""

import torch

WITHOUT_FLOAT64 = {"mps"}  # device types
_EXPONENT = 0xFF << 23  # the exponent's bits in a float32
_NAMES = {"tf32": "high", "bf16": "medium"}  # fp32_precision -> float32_matmul_precision


def compute_dtype(x):
    """The compute type, of logits, coefficients and losses: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide_dtype(device):
    """The type of sums over many terms."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widened(tensor):
    """The tensor in the type of sums."""
    return tensor.to(wide_dtype(tensor.device))


def float32_products(device_type):
    """The precision of float32 matrix products on a device type: "highest", "high" or "medium".

    It is torch.get_float32_matmul_precision(), unless `fp32_precision` in torch.backends has been
    set later: each device type has its own, which decides. The getter raises if a device has a
    lower precision than it would return; it does not show a higher one.
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
    """The largest power of two up to |x|, for float32 numbers; 0 for subnormal x.

    Infinity and NaN become infinity.
    """
    return x.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)


def rounded_off(one, other, total):
    """The rounding error one + other - total of the float sum `total`, exact; 0 if not finite.

    Knuth, TAOCP 2, section 4.2.2, theorem B.
    """
    part = total - one
    lost = (one - (total - part)) + (other - part)
    return torch.where(lost.isfinite(), lost, 0.0)


def inverse_norms(x):
    """1 / |x| (...) for rows x (..., D); 0 if |x| is not a normal number of the compute type."""
    compute = compute_dtype(x)
    tiny = torch.finfo(compute).tiny
    if wide_dtype(x.device) == torch.float64:
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        return norm.reciprocal().masked_fill_(norm < tiny, 0.0)
    # Squares of float32 numbers may leave its range, so rows are divided by their largest first.
    x = x.to(compute)
    largest = x.abs().amax(-1)
    size = torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(x / size[..., None], dim=-1)
    return torch.where(largest < tiny, 0.0, 1 / norm / size)
