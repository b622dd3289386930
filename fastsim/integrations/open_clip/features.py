"""Features and logit scales as open_clip's losses get them."""

import torch
from torch import Tensor

from fastsim.checks import INTEGRAL, check_alike, check_embeddings, check_number
from fastsim.engine.autograd import tile_loss
from fastsim.integrations.dtypes import in_one_dtype
from fastsim.reduce import as_float, equal_row_weights
from fastsim.scores import compute_dtype

NAMES = "image_features", "text_features", "logit_scale"


def checked(image_features, text_features, logit_scale, *, prefix=""):
    """(image features, text features, scale): everything looked at, the scale positive.

    A scale of 0 or less is multiplied into the image features, and 1 is left. Off the CPU a tensor
    is not looked at, as that would wait for the device: the features are multiplied by 1 or by it.
    prefix: of the arguments' names.
    """
    images, texts, of_logits = (f"{prefix}{name}" for name in NAMES)
    check_embeddings(images, image_features)
    check_embeddings(texts, text_features)
    image_features, text_features = in_one_dtype(image_features, text_features)
    check_alike(texts, text_features, images, image_features, rows=True)
    scale = scalar(of_logits, logit_scale)
    check_number(of_logits, scale)
    if _is_read(scale) and scale <= 0:
        return as_float(image_features) * scale, as_float(text_features), 1.0
    if not _is_read(scale):
        above = scale > 0
        factor = torch.where(above, 1.0, scale).to(image_features.dtype)
        return image_features * factor, text_features, torch.where(above, scale, 1.0)
    return image_features, text_features, scale


def _is_read(scale):
    on_cpu = not isinstance(scale, Tensor) or scale.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling()


def on_few(loss, given):
    """The loss of two rows of the features; the numbers as they are."""
    return loss(*(value.detach()[:2] if _is_matrix(value) else value for value in given))


def _is_matrix(value):
    return isinstance(value, Tensor) and value.ndim == 2


def scalar(name, value):
    """A number or a tensor of one element, whatever its shape; integers as float32."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: wanted one element, got shape {tuple(value.shape)}")
        value = value.reshape(())
        return value.float() if value.dtype in INTEGRAL else value
    return value


def mean(tile, rows, columns, scale, formula, backend, **rest):
    """The mean over the rows of a tile loss; `formula` as for `tile_loss`."""
    weights = equal_row_weights("mean", rows.shape[0], compute_dtype(rows), rows.device)
    given = {"weights": weights, "formula": formula, "backend": backend}
    return tile_loss(tile, rows, columns, scale=scale, **given, **rest)
