"""Modules in the place of a peer's: every name of theirs, and none that tells Python otherwise."""

import importlib
import importlib.util
import re
import subprocess
import sys
import types

import pytest

from fastsim.integrations import names
from tests.integrations.peer_names import assert_serves

# module of theirs, whether it is written out or imported whole -> module of ours in its place
PLACES = {
    "sentence_transformers.sentence_transformer.losses": "sentence_transformers",
    "sentence_transformers.multi_vector_encoder.losses": "sentence_transformers.multi_vector",
    "pytorch_metric_learning.losses": "pytorch_metric_learning.losses",
    "pytorch_metric_learning.miners": "pytorch_metric_learning.miners",
    "open_clip.loss": "open_clip",
}
DUNDER = ("__path__", "__file__", "__spec__", "__loader__", "__package__", "__name__", "__doc__")


def both(name):
    """(theirs, ours); skipped where theirs is not installed."""
    ours = f"fastsim.integrations.{PLACES[name]}"
    if name == "open_clip.loss":  # its package may not be importable whole
        mine = pytest.importorskip(ours, reason="it is not installed", exc_type=ImportError)
        return mine.peer.losses(), mine
    theirs = pytest.importorskip(name, reason="it is not installed")
    return theirs, importlib.import_module(ours)


@pytest.mark.parametrize("name", PLACES)
def test_every_name_of_theirs(name):
    theirs, ours = both(name)
    assert_serves(ours, theirs)
    assert set(vars(ours)) <= set(dir(ours))


@pytest.mark.parametrize("name", PLACES)
def test_import_of_everything(name):
    theirs, ours = both(name)
    wanted, found = {}, {}
    exec(f"from {theirs.__name__} import *", wanted)
    exec(f"from {ours.__name__} import *", found)
    assert set(wanted) <= set(found)
    beyond = set(found) - set(wanted)
    assert all(getattr(found[n], "__module__", "").startswith("fastsim.") for n in beyond), beyond


def test_import_of_everything_gives_what_theirs_gives():
    """Of a module without a list every name that begins with no underscore."""
    plain, listed = types.ModuleType("plain"), types.ModuleType("listed")
    plain.shown = plain._hidden = listed.named = listed.other = 1
    listed.__all__ = ["named"]
    *_, exported = names.forwarding(__name__, plain, listed, lambda: plain)
    assert exported == ["shown", "named"]


@pytest.mark.parametrize("name", PLACES)
def test_what_python_asks_of_a_module_is_ours(name):
    theirs, ours = both(name)
    for attribute in DUNDER:
        own = vars(ours).get(attribute)
        assert getattr(ours, attribute, None) is own
        assert own is None or own != vars(theirs).get(attribute), attribute
    with pytest.raises(AttributeError, match=rf"{ours.__name__}.*NoSuchLoss.*{theirs.__name__}"):
        _ = ours.NoSuchLoss
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module(f"{ours.__name__}.no_such_module")


def test_their_files_are_not_run_under_our_name():
    pytest.importorskip("pytorch_metric_learning", reason="it is not installed")
    with pytest.raises(ModuleNotFoundError, match=r"losses\.angular_loss"):
        importlib.import_module("fastsim.integrations.pytorch_metric_learning.losses.angular_loss")


@pytest.mark.parametrize(
    "name", ["distances", "reducers", "regularizers", "samplers", "testers", "utils"]
)
def test_siblings(name):
    theirs = pytest.importorskip(f"pytorch_metric_learning.{name}", reason="it is not installed")
    from fastsim.integrations import pytorch_metric_learning as ours

    assert getattr(ours, name) is theirs
    assert name in dir(ours)


def test_siblings_are_imported_when_they_are_asked_for():
    pytest.importorskip("pytorch_metric_learning", reason="it is not installed")
    code = (
        "import sys\nfrom fastsim.integrations import pytorch_metric_learning as ours\n"
        "assert 'pytorch_metric_learning.testers' not in sys.modules\n"
        "assert 'testers' in dir(ours)\n"
        "assert not hasattr(ours, 'no_such_module')\n"
        "assert not hasattr(ours, '__version__')\n"  # a dunder name: it is not passed on
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_options_of_our_own_losses():
    """The names with which they are written, from the module itself."""
    theirs, ours = both("sentence_transformers.sentence_transformer.losses")
    for name in ("TripletDistanceMetric", "BatchHardTripletLossDistanceFunction"):
        assert getattr(ours, name) is getattr(theirs, name)
    for name in ("MatryoshkaLoss", "ContrastiveLoss", "SiameseDistanceMetric", "EmbedDistillLoss"):
        assert getattr(ours, name) is getattr(theirs, name)


EARLIER = [
    ("5.7.0", "6"),
    ("1.5.20", "1.5.21"),
    ("1.5", "1.5.1"),
    ("3.2.1rc1", "3.3"),
    ("of-today", "1"),
]
LATER = [
    ("6.2", "6"),
    ("1.5.21", "1.5.21"),
    ("1.6", "1.5.21"),
    ("1.10", "1.9"),
    ("3.3rc1", "3.3.0"),
]


def check(least):
    names.check_version("their-package", *map(int, least.split(".")))


@pytest.mark.parametrize(("found", "least"), EARLIER)
def test_an_earlier_version_of_theirs_is_refused_by_name(found, least, monkeypatch):
    monkeypatch.setattr(names, "version", lambda package: found)
    said = re.escape(f"their-package: wanted version {least} or later, got {found}")
    with pytest.raises(ImportError, match=said):
        check(least)


@pytest.mark.parametrize(("found", "least"), LATER)
def test_a_later_version_of_theirs_is_not(found, least, monkeypatch):
    monkeypatch.setattr(names, "version", lambda package: found)
    check(least)


def test_a_checkout_that_is_not_installed_has_no_version():
    check("99")


@pytest.mark.parametrize(
    ("module", "package", "found"),
    [
        ("lightly", "lightly", "1.5.20"),
        ("pylate", "pylate", "1.5.9"),
        ("open_clip", "open_clip_torch", "3.2.0"),
    ],
)
def test_the_least_version_of(module, package, found):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    code = (
        "from fastsim.integrations import names\n"
        f"names.version = lambda package: {found!r}\n"
        f"import fastsim.integrations.{module}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"{package}: wanted version" in done.stderr.splitlines()[-1]
