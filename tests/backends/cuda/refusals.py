"""What the CUDA backend refuses by design; anything else that it refuses is a fault."""

import pytest

from fastsim.backends.extras import EXTRAS

BEGINNING = "backend 'cuda' cannot be used: "
EXPECTED = ("it has no kernels of kind", *EXTRAS.values())


def skip_expected(error):
    """Skips the test with what the backend refused in its own words, or raises the error."""
    said = str(error)
    if said.startswith(tuple(BEGINNING + reason for reason in EXPECTED)):
        pytest.skip(said)
    raise error
