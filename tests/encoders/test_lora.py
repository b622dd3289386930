"""Low-rank additions to an encoder's layers, by peft."""

import pytest
import torch

from fastsim.encoders.encoder import Encoder
from tests import models
from tests.encoders.close import wide
from tests.measure import STEP, assert_close

pytest.importorskip("transformers")
pytest.importorskip("peft")
TEXTS = models.texts()


@pytest.mark.parametrize("folder", [models.tiny_bert, models.tiny_decoder])
def test_lora_trains_little_and_saves_the_sum(folder, tmp_path):
    encoder = Encoder.from_pretrained(folder())
    every = sum(parameter.numel() for parameter in encoder.parameters())
    encoder.add_lora(2)
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) < every / 5
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn_like(parameter) / 4)
    expected, truth = directions(encoder), directions(wide(encoder), dtype=torch.float64)
    moved = moved_by_rounding(encoder, truth)
    encoder.save_pretrained(tmp_path / "sum")
    assert torch.equal(directions(encoder), expected)  # still with its additions
    encoder.model.save_pretrained(tmp_path / "adapter")  # a folder of peft's own
    for name in ("sum", "adapter"):
        found = directions(Encoder.from_pretrained(tmp_path / name))
        assert_close(name, found, truth, expected, torch.float32, moved=moved)


def moved_by_rounding(encoder, truth):
    """How much rounding every weight once moves the truth: the sum W + scale B A is rounded too."""

    def rounded(encoder):
        with torch.no_grad():
            for weight in encoder.parameters():
                weight *= 1 + STEP * (2.0 * torch.randint_like(weight, 2) - 1)
        return encoder

    step = directions(rounded(wide(encoder)), dtype=torch.float64) - truth
    return step.abs().max().item() / STEP * torch.finfo(torch.float32).eps


def directions(encoder, **options):
    return torch.nn.functional.normalize(encoder.encode(TEXTS, **options))


def test_a_lora_addition_is_scaled():
    """W + scale B A, of a layer of width 32."""
    encoder = Encoder.from_pretrained(models.tiny_bert())
    place = "encoder.layer.0.attention.self.query"
    before = encoder.model.get_submodule(place).weight.detach().double()
    encoder.add_lora(3, scale=0.7)
    layer = encoder.model.get_base_model().get_submodule(place)
    down, up = (side["default"].weight for side in (layer.lora_A, layer.lora_B))
    assert (down.shape, up.shape) == ((3, 32), (32, 3))
    with torch.no_grad():
        down.normal_()
        up.normal_()
    merged = encoder.model.merge_and_unload().get_submodule(place).weight.double()
    terms = up.double().abs() @ down.double().abs()
    # A rounding for each of three products, their sum, the scale and the addition.
    bound = 8 * torch.finfo(torch.float32).eps * (before.abs() + 0.7 * terms).max()
    assert (merged - before - 0.7 * up.double() @ down.double()).abs().max() <= bound


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_additions_leave_a_decoder_its_positions():
    """Padded on the left these are counted from the first token, below an adapter too."""
    encoder = Encoder.from_pretrained(models.tiny_decoder())
    encoder.tokenizer.padding_side = "left"
    before = encoder.encode(TEXTS)
    encoder.add_lora(2)  # which adds nothing yet
    assert torch.equal(encoder.encode(TEXTS), before)
