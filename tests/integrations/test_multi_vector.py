"""sentence-transformers' multi-vector losses and PyLate's against ours in their place."""

import copy
import importlib
import inspect
import pickle

import pytest
import torch

from tests.integrations.peer_names import assert_serves

# PyLate's own imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

QUERIES, DOCUMENTS, TOKENS, WIDTH = 6, 3, (4, 7), 10


@pytest.fixture
def sentences():
    """(their losses, ours); skipped where theirs are not installed."""
    name = "sentence_transformers.multi_vector_encoder.losses"
    theirs = pytest.importorskip(name, reason="it is not installed")
    return theirs, importlib.import_module(
        "fastsim.integrations.sentence_transformers.multi_vector"
    )


@pytest.fixture
def pylate():
    """(their scores, our module); skipped where PyLate is not installed."""
    theirs = pytest.importorskip(
        "pylate.scores", reason="it is not installed", exc_type=ImportError
    )
    return theirs, importlib.import_module("fastsim.integrations.pylate")


def texts(*shape, generator=None):
    """Unit tokens and a mask that leaves each text one."""
    values = torch.nn.functional.normalize(torch.randn(*shape, WIDTH), dim=-1)
    mask = torch.rand(*shape) < 0.7
    mask[..., 1] = True
    return values, mask


def differentiated(call, *sides):
    leaves = [side.clone().requires_grad_() for side in sides]
    value = call(*leaves)
    weights = torch.linspace(-1, 2, value.numel()).reshape(value.shape)
    (value * weights).sum().backward()  # which hooks of cached losses need
    return value.detach(), [leaf.grad for leaf in leaves]


def compare(ours, theirs, *sides):
    torch.testing.assert_close(differentiated(ours, *sides), differentiated(theirs, *sides))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("prefix", ["", "mean_"])
@pytest.mark.parametrize("form", ["colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise"])
def test_scores_of_sentence_transformers(form, prefix, masked, sentences, monkeypatch):
    from sentence_transformers.multi_vector_encoder import scoring

    theirs, ours = getattr(scoring, prefix + form), getattr(sentences[1], prefix + form)
    many = (QUERIES,) if "pairwise" in form else (QUERIES, DOCUMENTS)
    (q, q_mask), (d, d_mask) = texts(QUERIES, TOKENS[0]), texts(*many, TOKENS[1])
    d[1, ..., 3, :] = q[0, 0] = 0  # padding there, where no mask is given
    d[..., 0, 0] = q[:, 1, 0] = 0  # and none here
    masks = {"queries_mask": q_mask, "documents_mask": d_mask} if masked else {}
    compare(lambda q, d: ours(q, d, **masks), lambda q, d: theirs(q, d, **masks), q, d)
    for dtype in (torch.float64, torch.bfloat16):
        given = [side.to(dtype) for side in (q, d)]
        mine, peer = ours(*given, **masks), theirs(*given, **masks)
        # With a mask of the queries theirs are cut to float32; nothing is gained by that.
        assert mine.dtype == (torch.promote_types(dtype, torch.float32) if masked else peer.dtype)
    q_mask[0] = d_mask[2] = False
    torch.testing.assert_close(ours(q, d, **masks), theirs(q, d, **masks))
    # Masks as tokenizers make them, and tensors that are views of others.
    masks = {name: mask.long() for name, mask in masks.items()}
    q, d = (side.transpose(0, 1).contiguous().transpose(0, 1) for side in (q, d))
    for average in (False, True):
        found = ours(q, d, **masks, length_normalize=average)
        torch.testing.assert_close(found, theirs(q, d, **masks, length_normalize=average))
    # Weights of tokens are scored by their code.
    if masked and form == "colbert_scores":
        weights = torch.rand(QUERIES, TOKENS[0])
        torch.testing.assert_close(ours(q, d, weights), theirs(q, d, weights))


OTHERS = {
    "lists": lambda q, d: (list(q), list(d)),
    "arrays": lambda q, d: (q.numpy(), d.numpy()),
    "integers": lambda q, d: ((9 * q).long(), (9 * d).long()),
    "two dtypes": lambda q, d: (q.double(), d),
    "one query": lambda q, d: (q[0], d),
    "no queries": lambda q, d: (q[:0], d),
    "no tokens of queries": lambda q, d: (q[:, :0], d),
    "no documents": lambda q, d: (q, d[:0]),
    "no tokens of documents": lambda q, d: (q, d[..., :0, :]),
}


@pytest.mark.parametrize("prefix", ["", "mean_"])
@pytest.mark.parametrize("form", ["colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise"])
@pytest.mark.parametrize("other", OTHERS)
def test_what_max_sim_does_not_take(other, form, prefix, sentences):
    """Is scored by their code, with every option; or is their error."""
    from sentence_transformers.multi_vector_encoder import scoring

    many = (QUERIES,) if "pairwise" in form else (QUERIES, DOCUMENTS)
    sides = OTHERS[other](torch.randn(QUERIES, TOKENS[0], WIDTH), texts(*many, TOKENS[1])[0])
    for average in (False, True):
        found = []
        for module in (sentences[1], scoring):
            try:
                found.append(getattr(module, prefix + form)(*sides, length_normalize=average))
            except Exception as error:
                found.append((type(error), str(error)))
        assert found[0] == found[1] if isinstance(found[1], tuple) else torch.equal(*found)


@pytest.mark.parametrize("masked", [False, True])
def test_their_code_is_given_every_argument(masked, sentences, monkeypatch):
    told = []

    def maxsim(*given, a_mask, b_mask, chunk_elements, length_normalize):
        told.append((a_mask is None, b_mask is None, chunk_elements, length_normalize))
        return torch.zeros(QUERIES, QUERIES)

    scores = sentences[1].colbert_scores
    monkeypatch.setitem(scores.__wrapped__.__globals__, "maxsim", maxsim)
    (q, q_mask), (d, d_mask) = texts(QUERIES, TOKENS[0]), texts(QUERIES, 1, TOKENS[1])
    masks = (q_mask, d_mask) if masked else (None, None)
    scores(list(q), list(d), *masks, 3, True)
    assert told == [(not masked, not masked, 3, True)]


@pytest.mark.parametrize("prefix", ["", "mean_"])
@pytest.mark.parametrize("form", ["colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise"])
def test_masks_of_sentence_transformers(form, prefix, sentences):
    """Integers weight the tokens of queries; theirs stretches masks, and refuses other shapes."""
    from sentence_transformers.multi_vector_encoder import scoring

    theirs, ours = getattr(scoring, prefix + form), getattr(sentences[1], prefix + form)
    many = (QUERIES,) if "pairwise" in form else (QUERIES, DOCUMENTS)
    (q, q_mask), (d, d_mask) = texts(QUERIES, TOKENS[0]), texts(*many, TOKENS[1])
    weights = [mask * torch.randint(1, 4, mask.shape) for mask in (q_mask, d_mask)]
    compare(lambda q, d: ours(q, d, *weights), lambda q, d: theirs(q, d, *weights), q, d)
    for masks in ((q_mask[:1], d_mask), (q_mask, d_mask[:1])):
        assert torch.equal(ours(q, d, *masks), theirs(q, d, *masks))
    other = d[:, None] if "pairwise" in form else d[:, 0]
    for scores in (ours, theirs):
        with pytest.raises((ValueError, RuntimeError)):
            scores(q, other)


class Given(torch.nn.Module):
    """Stands in for an encoder: the features hold the embeddings of the tokens."""

    def forward(self, features, task=None, **_):
        return {
            "token_embeddings": features["embeddings"],
            "attention_mask": features["attention_mask"],
        }


LOSSES = {
    "MultiVectorMultipleNegativesRankingLoss": {"scale": 3.0},
    "CachedMultiVectorMultipleNegativesRankingLoss": {"scale": 3.0, "mini_batch_size": 2},
    "MultiVectorDistillKLDivLoss": {"temperature": 0.7},
    "MultiVectorMarginMSELoss": {},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_sentence_transformers(name, sentences):
    columns = [texts(QUERIES, TOKENS[0]), *(texts(QUERIES, TOKENS[1]) for _ in range(DOCUMENTS))]
    labels = torch.randn(QUERIES, DOCUMENTS)
    sides, masks = zip(*columns, strict=True)

    def call(module):
        loss = getattr(module, name)(Given(), **LOSSES[name])

        def value(*leaves):
            pairs = zip(leaves, masks, strict=True)
            # The ids are what mini-batches are cut by.
            ids = [{"input_ids": m.long(), "embeddings": e, "attention_mask": m} for e, m in pairs]
            return loss(ids, labels)

        return value, loss

    theirs, ours = (call(module) for module in sentences)
    assert issubclass(type(ours[1]), type(theirs[1]))
    assert ours[1].get_config_dict() == theirs[1].get_config_dict()
    assert ours[1].similarity_fct is not theirs[1].similarity_fct
    compare(ours[0], theirs[0], *sides)


@pytest.mark.parametrize("name", LOSSES)
def test_interface_of_sentence_transformers(name, sentences):
    theirs, ours = (getattr(module, name) for module in sentences)
    assert inspect.signature(ours) == inspect.signature(theirs)
    loss = ours(Given())
    fused, loss.similarity_fct = loss.similarity_fct, theirs(Given()).similarity_fct
    assert loss.similarity_fct is fused  # where it is set later, too


@pytest.mark.parametrize("name", LOSSES)
def test_losses_can_be_pickled(name, sentences):
    """The card links a class that is of the package; ours is found again by pickle."""
    from sentence_transformers.util import fullname

    theirs, ours = (getattr(module, name) for module in sentences)
    assert fullname(ours) == fullname(theirs)
    loss = ours(Given(), **LOSSES[name])
    for again in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert type(again) is ours
        assert again.similarity_fct is loss.similarity_fct
        assert again.get_config_dict() == loss.get_config_dict()


@pytest.mark.parametrize("prefix", ["", "mean_"])
@pytest.mark.parametrize("form", ["colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise"])
def test_scores_can_be_pickled(form, prefix, sentences):
    scores = getattr(sentences[1], prefix + form)
    assert pickle.loads(pickle.dumps(scores)) is scores


def test_another_score_stays(sentences):
    from sentence_transformers.multi_vector_encoder.scoring import XTRScores

    class Unhashable(XTRScores):
        __hash__ = None

    for score in (XTRScores(top_k=3), Unhashable(top_k=3)):
        loss = sentences[1].MultiVectorMultipleNegativesRankingLoss(Given(), similarity_fct=score)
        assert loss.similarity_fct is score


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
