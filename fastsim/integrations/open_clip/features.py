"""The features and logit scales that open_clip's losses are given."""

import torch
from torch import Tensor

from fastsim.checks import INTEGRAL, check_alike, check_embeddings, check_number
from fastsim.engine.autograd import tile_loss
from fastsim.integrations.dtypes import in_one_dtype
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float, equal_row_weights

NAMES = "image_features", "text_features", "logit_scale"


def checked_features(image_features, text_features, logit_scale, *, prefix=""):
    """(image features, text features, scale), all checked, with a positive scale.

    A scale of 0 or less is multiplied into the image features and becomes 1. The value of a tensor
    off the CPU is not read, as that would wait for the device: the same is done there by
    `torch.where`. prefix: of the arguments' names, for messages.
    """
    images, texts, scale_name = (f"{prefix}{name}" for name in NAMES)
    check_embeddings(images, image_features)
    check_embeddings(texts, text_features)
    image_features, text_features = in_one_dtype(image_features, text_features)
    check_alike(texts, text_features, images, image_features, rows=True)
    scale = scalar(scale_name, logit_scale)
    check_number(scale_name, scale)
    if _is_read(scale) and scale <= 0:
        return as_float(image_features) * scale, as_float(text_features), 1.0
    if not _is_read(scale):
        positive = scale > 0
        factor = torch.where(positive, 1.0, scale).to(image_features.dtype)
        return image_features * factor, text_features, torch.where(positive, scale, 1.0)
    return image_features, text_features, scale


def _is_read(scale):
    on_cpu = not isinstance(scale, Tensor) or scale.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling()


def on_two_rows(loss, inputs):
    """The loss of the first two rows of the features, with the other inputs as they are."""
    return loss(*(value.detach()[:2] if _is_matrix(value) else value for value in inputs))


def _is_matrix(value):
    return isinstance(value, Tensor) and value.ndim == 2


def scalar(name, value):
    """A number, or a tensor of one element as a 0-d tensor; integers become float32."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: wanted one element, got shape {tuple(value.shape)}")
        value = value.reshape(())
        return value.float() if value.dtype in INTEGRAL else value
    return value


def mean_loss(tile, rows, columns, scale, formula, backend, **options):
    """The mean over the rows of a tile loss; `formula` and options as for `tile_loss`."""
    weights = equal_row_weights("mean", rows.shape[0], compute_dtype(rows), rows.device)
    options |= {"weights": weights, "formula": formula, "backend": backend}
    return tile_loss(tile, rows, columns, scale=scale, **options)
