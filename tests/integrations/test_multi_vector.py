"""sentence-transformers' multi-vector losses and scores against ours in their place."""

import copy
import importlib
import inspect
import pickle

import pytest
import torch

from tests.integrations.token_peer import DOCUMENTS, QUERIES, TOKENS, WIDTH, Given, compare, texts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def sentences():
    """(their losses, ours); skipped where theirs are not installed."""
    name = "sentence_transformers.multi_vector_encoder.losses"
    theirs = pytest.importorskip(name, reason="it is not installed")
    return theirs, importlib.import_module(
        "fastsim.integrations.sentence_transformers.multi_vector"
    )


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
