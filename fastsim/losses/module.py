"""The base class of losses as modules."""

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
)  # options that are data of one batch, so arguments of forward


class LossModule(torch.nn.Module):
    """A loss function with fixed options: `Loss(**options)(*embeddings, ...)`.

    A subclass sets `function`. Its constructor has the function's keyword-only parameters with
    their defaults and passes its `locals()` to this one; forward takes the other parameters. An
    option that is a torch.nn.Parameter (temperature, scale, bias) is a parameter of the module.
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
        """Computes the loss of this batch with the options of the module."""
        options = {name: getattr(self, name) for name in self._options}
        return type(self).function(*args, **options, **kwargs)

    def __getstate__(self):
        """The state with the name of a process group in its place, as a group cannot be saved."""
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
