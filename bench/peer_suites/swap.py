"""Our classes in the place of a package's own, wherever its modules name them."""

import importlib
import inspect
import sys

import torch

# package -> (its modules, ours in their place)
MODULES = {
    "sentence_transformers": {
        "sentence_transformers.sentence_transformer.losses": (
            "fastsim.integrations.sentence_transformers"
        ),
        "sentence_transformers.multi_vector_encoder.losses": (
            "fastsim.integrations.sentence_transformers.multi_vector"
        ),
    },
    "pytorch_metric_learning": {
        f"pytorch_metric_learning.{name}": f"fastsim.integrations.pytorch_metric_learning.{name}"
        for name in ("losses", "miners")
    },
    "open_clip": {"open_clip.loss": "fastsim.integrations.open_clip"},
}


def classes(package):
    """{class of theirs: the subclass of it that stands for it}."""
    found = {}
    for theirs, ours in MODULES[package].items():
        theirs, ours = importlib.import_module(theirs), importlib.import_module(ours)
        for name, kind in vars(ours).items():
            replaced = vars(theirs).get(name)
            if inspect.isclass(kind) and inspect.isclass(replaced) and kind is not replaced:
                found[replaced] = kind
    return found


def swap(package):
    """Ours for theirs in every module of the package; a set that fills.

    It holds the names of those of which objects were made since.
    """
    replaced, made = classes(package), set()
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for attribute, value in list(vars(module).items()):
                if inspect.isclass(value) and value in replaced:
                    setattr(module, attribute, replaced[value])
    init = torch.nn.Module.__init__

    def noted(self, *given, **options):
        made.update(k.__name__ for k in type(self).__mro__ if k in replaced.values())
        init(self, *given, **options)

    torch.nn.Module.__init__ = noted
    return made
