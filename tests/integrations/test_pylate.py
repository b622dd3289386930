"""PyLate's scores and losses against ours in their place."""

import importlib
import inspect

import pytest
import torch

from tests.integrations.peer_names import assert_serves
from tests.integrations.token_peer import DOCUMENTS, QUERIES, TOKENS, Given, compare, texts

# PyLate's own imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def pylate():
    """(their scores, our module); skipped where PyLate is not installed."""
    theirs = pytest.importorskip(
        "pylate.scores", reason="it is not installed", exc_type=ImportError
    )
    return theirs, importlib.import_module("fastsim.integrations.pylate")


FORMS = ["colbert_scores", "colbert_kd_scores", "ColBERTScores"]


def of_pylate(form, pylate):
    """(their scores, ours, queries and documents, their masks)."""
    theirs, ours = (getattr(module, form) for module in pylate)
    if form == "ColBERTScores":
        theirs, ours = theirs(), ours()
    many = (DOCUMENTS,) if form == "colbert_scores" else (QUERIES, DOCUMENTS)
    (q, q_mask), (d, d_mask) = texts(QUERIES, TOKENS[0]), texts(*many, TOKENS[1])
    return theirs, ours, (q, d), (q_mask, d_mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_dtypes_of_pylate(form, dtype, pylate):
    """Masked too, and a mask of integers is the same mask."""
    theirs, ours, sides, masks = of_pylate(form, pylate)
    sides = [side.to(dtype) for side in sides]
    truth = theirs(*(side.double() for side in sides), *masks)
    for given in (masks, [mask.long() for mask in masks]):
        mine, peer = (scores(*sides, *given) for scores in (ours, theirs))
        assert mine.dtype == peer.dtype == dtype
        torch.testing.assert_close(mine, truth.to(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_autocast_rounds_no_scores_of_pylate(form, pylate):
    """Theirs are returned in its dtype, ours are those of the embeddings in its dtype."""
    theirs, ours, sides, masks = of_pylate(form, pylate)
    with torch.autocast("cpu", torch.bfloat16):
        mine, peer = (scores(*sides, *masks) for scores in (ours, theirs))
    assert (mine.dtype, peer.dtype) == (torch.float32, torch.bfloat16)
    truth = theirs(*(side.bfloat16().double() for side in sides), *masks)
    torch.testing.assert_close(mine, truth.float())


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_tokens_are_pylates(form, pylate):
    theirs, ours, sides, masks = of_pylate(form, pylate)
    weights = [torch.rand(mask.shape) for mask in masks]
    assert torch.equal(ours(*sides, *weights), theirs(*sides, *weights))


@pytest.mark.parametrize("form", FORMS)
def test_integers_that_are_weights_for_pylate(form, pylate):
    theirs, ours, sides, masks = of_pylate(form, pylate)
    weights = [mask * torch.randint(1, 4, mask.shape) for mask in masks]
    compare(lambda q, d: ours(q, d, *weights), lambda q, d: theirs(q, d, *weights), *sides)


@pytest.mark.parametrize("form", FORMS)
def test_other_shapes_are_pylates(form, pylate):
    """It stretches masks and a single query, and refuses the rest."""
    theirs, ours, (q, d), masks = of_pylate(form, pylate)
    given = [(q, d, masks[0][:1], masks[1]), (q, d, masks[0], masks[1][:1])]
    given.append((q, d, masks[0][:, :1]))
    if form == "colbert_kd_scores":
        given.append((q[:1], d))
    for inputs in given:
        assert torch.equal(ours(*inputs), theirs(*inputs))
    other = d.expand(QUERIES, *d.shape) if form == "colbert_scores" else d[:, 0]
    for scores in (ours, theirs):
        with pytest.raises(Exception, match=r"einsum|unpack"):
            scores(q, other)


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_pylate(form, pylate):
    theirs, ours, sides, masks = of_pylate(form, pylate)
    arrays = [side.numpy() for side in sides]
    assert torch.equal(ours(*arrays), theirs(*arrays))
    assert torch.equal(ours(*arrays, *masks), theirs(*arrays, *masks))


EMPTY = ["no queries", "no tokens of queries", "no documents", "no tokens of documents"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_score_for_pylate(form, empty, masked, pylate):
    """What theirs give, or the error that they raise."""
    theirs, ours, sides, masks = of_pylate(form, pylate)
    side = int("documents" in empty)

    def cut(parts):
        part = parts[side][:, :0] if "tokens" in empty and not side else parts[side][:0]
        if "tokens" in empty and side:
            part = parts[side][..., :0] if parts is masks else parts[side][..., :0, :]
        return [part if place == side else value for place, value in enumerate(parts)]

    given = [*cut(sides), *(cut(masks) if masked else [])]
    found = []
    for scores in (ours, theirs):
        try:
            found.append(scores(*given))
        except Exception as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1] if isinstance(found[1], tuple) else torch.equal(*found)


@pytest.mark.parametrize("form", FORMS)
def test_a_backend_of_pylate_that_is_asked_for(form, pylate, monkeypatch):
    """By the argument or by the variable, at every call; theirs need a GPU, one of them."""

    def refused(*given, **options):
        raise AssertionError("ours was called")

    theirs, ours, sides, _ = of_pylate(form, pylate)
    monkeypatch.setattr(pylate[1], "max_sim", refused)
    for asked in (None, "auto", "AUTO"):
        with pytest.raises(AssertionError, match="ours was called"):
            ours(*sides, backend=asked)
    assert torch.equal(ours(*sides, backend="torch"), theirs(*sides))
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "Torch")
    assert torch.equal(ours(*sides), theirs(*sides))
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "flash")
    with pytest.raises(RuntimeError, match="flash"):
        ours(*sides)
    with pytest.raises(AssertionError, match="ours was called"):
        ours(*sides, backend="auto")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_scores_of_pylate(form, masked, pylate):
    theirs, ours, (q, d), masks = of_pylate(form, pylate)
    masks = masks if masked else ()
    compare(lambda q, d: ours(q, d, *masks), lambda q, d: theirs(q, d, *masks), q, d)


def test_names_of_pylate(pylate):
    assert_serves(pylate[1], importlib.import_module("pylate.losses"))


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive", "Distillation"])
def test_losses_of_pylate(name, pylate):
    from pylate import losses as theirs

    loss = getattr(pylate[1], name)(Given())
    assert isinstance(loss, getattr(theirs, name))
    assert inspect.signature(type(loss)) == inspect.signature(getattr(theirs, name))
    scores = loss.score_metric
    assert type(scores) is pylate[1].ColBERTScores or scores is pylate[1].colbert_kd_scores
    other = getattr(pylate[1], name)(Given(), score_metric=len)
    assert other.score_metric is len


def test_scores_that_a_loss_of_pylate_keeps(pylate):
    """Ours take the place of theirs as they are, and of nothing that somebody made of them."""
    theirs, ours = pylate

    class Further(theirs.ColBERTScores):
        """A user's scores."""

    changed = theirs.ColBERTScores()
    changed.factor = 2.0
    for scores in (Further(), changed):
        assert ours.Contrastive(Given(), score_metric=scores).score_metric is scores
    for name in ("colbert_scores", "colbert_kd_scores"):
        loss = ours.Contrastive(Given(), score_metric=getattr(theirs, name))
        assert loss.score_metric is getattr(ours, name)
