"""Of the tests on a GPU, what the backend refuses by design is skipped with its own words."""

import pytest

from tests.backends.refusals import skip_expected


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except RuntimeError as error:
        if pyfuncitem.path.name != "test_gpu.py":
            raise
        skip_expected(error, "triton")
