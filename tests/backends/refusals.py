"""What the GPU backends refuse by design; anything else that they refuse is a fault."""

import pytest

from fastsim.backends.extras import EXTRAS

EXPECTED = ("it has no kernels of kind", *EXTRAS.values())


def skip_expected(error, backend):
    """Skips the test with what the backend refused in its own words, or raises the error."""
    said, beginning = str(error), f"backend {backend!r} cannot be used: "
    if said.startswith(tuple(beginning + reason for reason in EXPECTED)):
        pytest.skip(said)
    raise error
