"""What the tests ask of the network or of packages beside theirs, made here."""

import importlib
import importlib.machinery
import importlib.util
import string
import sys

from bench.examples import rows
from bench.examples import stand_ins as models

LAYERS, WIDTH, HEADS = 2, 128, 2  # of a model, as of the one that most tests ask for


def imported(package, checkout):
    """Theirs and ours, loaded; of open_clip the losses that are tested, of the checkout."""
    if package == "open_clip":
        alone(package, checkout / "src" / package)
    from bench.peer_suites.swap import MODULES

    for beside in ("pytest", "scipy", "sklearn"):  # what their tests import
        if importlib.util.find_spec(beside):
            importlib.import_module(beside)
    for theirs, ours in MODULES[package].items():
        importlib.import_module(theirs)
        importlib.import_module(ours)
    if package == "sentence_transformers":
        # Every word is spelled: unknown ones would make texts equal, and ties are rounding's.
        letters = string.ascii_lowercase + string.digits
        pieces = [*letters, *(f"##{letter}" for letter in letters)]
        rows.WORDS.extend(piece for piece in pieces if piece not in rows.WORDS)
        models.WIDTH, models.HEADS = WIDTH, HEADS
        models.folder(LAYERS, modern=False)


def alone(package, folder):
    """A package without its __init__, which asks for torchvision; its modules are found."""
    spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[package] = importlib.util.module_from_spec(spec)


def of(package):
    """Models, tokenizers and data sets by whatever name."""
    if package != "sentence_transformers":
        return
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    for kind in (SentenceTransformer, MultiVectorEncoder):
        models.named(kind, LAYERS)
    models.named_parts(LAYERS)
    models.small_data()
