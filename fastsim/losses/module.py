"""The thin module of a loss function."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsim.groups import named

PER_CALL = (
    "exclude",
    "candidate_bias",
    "guide",
    "own_negatives",
    "references",
)  # data of one batch, so an argument of forward


class LossModule(torch.nn.Module):
    """A loss function with its options fixed: `Loss(**options)(*embeddings, ...)`.

    A subclass names its `function`. Its constructor has the function's keyword-only parameters with
    their defaults and hands its `locals()` on; forward takes the rest. An option given as a
    torch.nn.Parameter (temperature, scale, bias) is learnt and saved like any other.
    """

    function: ClassVar[Callable[..., Tensor]]
    _options: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.function).parameters.values()
        names = (p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        cls._options = tuple(name for name in names if name not in PER_CALL)

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        for name in self._options:
            setattr(self, name, options[name])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The function on this batch, with the options of the module."""
        options = {name: getattr(self, name) for name in self._options}
        return type(self).function(*args, **options, **kwargs)

    def __getstate__(self):
        """A process group cannot be saved: its name can, and is looked up when it is needed."""
        state = self.__dict__.copy()
        if state.get("group") is not None:
            state["group"] = named(state["group"])
        return state

    def extra_repr(self):
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in self._options
            if not isinstance(getattr(self, name), torch.nn.Parameter)
        )
