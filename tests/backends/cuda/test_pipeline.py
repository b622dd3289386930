"""The protocol of the stages in every interleaving, right; and wrong where it is changed."""

import pytest

from tests.backends.cuda.pipeline import Protocol, ProtocolError


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("steps", range(1, 14))
def test_every_interleaving(stages, steps):
    assert Protocol(stages, steps).search() > 100


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_interleaving_of_late_copies(steps):
    assert Protocol(2, steps, late=True).search() > 1000


# The groups in no order; a stage given back before its product has read it; a stage given back to
# the producer of one block, when that of the other writes to it too.
@pytest.mark.parametrize("flaw", [{"turns": False}, {"early": True}, {"alone": True}], ids=str)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_flaw_shows(stages, flaw):
    with pytest.raises(ProtocolError, match="before"):
        Protocol(stages, stages + 1, **flaw).search()
