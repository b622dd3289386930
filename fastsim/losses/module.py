"""The thin module of a loss function."""

import inspect

import torch

PER_CALL = ("exclude",)  # data of one batch, so an argument of forward


class LossModule(torch.nn.Module):
    """A loss function with its options fixed: `Loss(**options)(*embeddings, ...)`.

    A subclass names its `function`; the constructor takes the function's keyword-only parameters
    with their defaults, forward the rest. An option given as a torch.nn.Parameter (temperature,
    scale, bias) is learnt and saved like any other.
    """

    function = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.function).parameters.values()
        options = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in PER_CALL]
        cls.__signature__ = inspect.Signature(options)
        cls._defaults = {p.name: p.default for p in options}

    def __init__(self, **options):
        super().__init__()
        for name in options:
            if name not in self._defaults:
                wanted = ", ".join(self._defaults)
                raise TypeError(f"{type(self).__name__}: wanted options {wanted}, got {name!r}")
        for name, default in self._defaults.items():
            setattr(self, name, options.get(name, default))

    def forward(self, *args, **kwargs):
        """The function on this batch, with the options of the module."""
        options = {name: getattr(self, name) for name in self._defaults}
        return type(self).function(*args, **options, **kwargs)

    def extra_repr(self):
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in self._defaults
            if not isinstance(getattr(self, name), torch.nn.Parameter)
        )
