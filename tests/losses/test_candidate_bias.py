"""The bias of candidates: its sign, by a case whose answer is known, and who refuses it."""

import pytest
import torch

import fastsim

BACKENDS = [name for name in fastsim.backends() if fastsim.backends()[name] is None]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("loss", [fastsim.info_nce, fastsim.matrix_cross_entropy])
@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_log_q_makes_the_softmax_over_the_catalogue(backend, loss, similarity):
    """Item j is in the batch n_j times of M, so it was drawn with q_j = n_j / M.

    sum over the batch of exp(z - log q) = sum_j n_j exp(z_j) M / n_j = M sum_j exp(z_j): the loss
    is that over the catalogue plus log(M q) of the positive, a constant.
    """
    items = torch.randn(11, 7, dtype=torch.float64, requires_grad=True)
    anchors = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    counts = torch.randint(1, 6, (11,))
    order = torch.randperm(int(counts.sum()))
    batch = torch.arange(11).repeat_interleave(counts)[order]
    log_q = (counts / counts.sum(dtype=torch.float64)).log()
    wanted = torch.randint(11, (6,))
    places = torch.stack([(batch == item).nonzero()[0, 0] for item in wanted])
    options = {"temperature": 0.3, "similarity": similarity, "reduction": "none"}

    def positives(columns, of):
        if loss is fastsim.info_nce:
            return of
        return torch.nn.functional.one_hot(of, columns).double()

    whole = loss(anchors, items, positives(11, wanted), **options, backend="eager")
    drawn = loss(
        anchors,
        items[batch],
        positives(len(batch), places),
        **options,
        candidate_bias=-log_q[batch],
        backend=backend,
    )
    torch.testing.assert_close(drawn, whole + (counts.sum() * log_q.exp()).log()[wanted])
    weights = torch.rand(6, dtype=torch.float64)
    for got, truth in zip(
        torch.autograd.grad((drawn * weights).sum(), (anchors, items)),
        torch.autograd.grad((whole * weights).sum(), (anchors, items)),
        strict=True,
    ):
        torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_kernels_that_add_none_refuse_it(backend):
    x, bias = torch.randn(4, 6), torch.randn(4)
    with pytest.raises(RuntimeError, match="its kernels cannot add a bias to the logits"):
        fastsim.info_nce(x, x, candidate_bias=bias, backend=backend)
