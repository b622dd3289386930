"""How float32 matrices are multiplied is read from torch, in whichever way it was set."""

import pytest
import torch

from fastsim.precision import float32_products

NAMES = ("highest", "high", "medium")
OF_DEVICES = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}


@pytest.fixture(autouse=True)
def kept():
    """Torch's own settings after the test."""
    name = torch.get_float32_matmul_precision()
    before = {place: place.fp32_precision for place in OF_DEVICES.values()}
    torch.set_float32_matmul_precision(NAMES[0])
    yield
    torch.set_float32_matmul_precision(name)
    for place, precision in before.items():
        place.fp32_precision = precision


@pytest.mark.parametrize("device", OF_DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_of_all_devices(device, name):
    torch.set_float32_matmul_precision(name)
    assert float32_products(device) == name


@pytest.mark.parametrize(
    ("device", "precision", "wanted"),
    [("cpu", "bf16", "medium"), ("cpu", "tf32", "high"), ("cuda", "tf32", "high")],
)
def test_of_one_device(device, precision, wanted):
    """Each device has its own then, and torch has no name for both."""
    OF_DEVICES[device].fp32_precision = precision
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    found = {name: float32_products(name) for name in OF_DEVICES}
    assert found == dict.fromkeys(OF_DEVICES, "highest") | {device: wanted}


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("device", OF_DEVICES)
def test_of_one_device_that_rounds_less(device, name):
    """torch keeps the name of both, and multiplies there in float32."""
    torch.set_float32_matmul_precision(name)
    OF_DEVICES[device].fp32_precision = "ieee"
    assert torch.get_float32_matmul_precision() == name
    found = {other: float32_products(other) for other in OF_DEVICES}
    assert found == dict.fromkeys(OF_DEVICES, name) | {device: "highest"}
