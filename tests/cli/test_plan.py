"""`fastsim plan`: its arithmetic, and its memory against what was measured."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from fastsim.backends.torch import panels
from fastsim.benchmark import results
from fastsim.cli import plan as planning
from fastsim.cli.plan import (
    PANEL_BYTES,
    PRODUCTS,
    Plan,
    dense,
    encoder_shape,
    estimates,
    measured_rate,
    memory,
    report,
    rounds,
    times,
)

SMALL = Plan(batch_size=1000, dim=64, ranks=4, micro_batch_size=8, columns=3)


def size(plan, name):
    return sum(count for part, count, _ in memory(plan) if part.startswith(name))


def test_memory_of_the_parts():
    # 250 anchors, 2000 candidates of which 500 are the rank's own.
    assert size(SMALL, "embeddings") == 2 * (250 + 500) * 64 * 4
    assert size(SMALL, "candidates") == 2 * 2000 * 64 * 4
    assert dense(SMALL) == 3 * 4 * 250 * 2000
    ring = dataclasses.replace(SMALL, exchange="ring")
    assert size(ring, "candidates") == 2 * 1500 * 64 * 4
    two = dataclasses.replace(ring, ranks=2)  # which has no more than both
    assert size(two, "candidates") == 2 * 2000 * 64 * 4
    alone = dataclasses.replace(SMALL, ranks=1)
    assert memory(dataclasses.replace(alone, exchange="ring")) == memory(alone)
    assert size(alone, "candidates") == 0
    assert size(alone, "embeddings") == 4 * size(SMALL, "embeddings")
    assert size(SMALL, "encoder") == size(SMALL, "micro-batch") == 0


def test_a_rank_has_the_rows_that_are_left_over():
    assert [Plan(rows, 64, ranks=4).rows for rows in (8, 9, 10, 12, 13)] == [2, 3, 3, 3, 4]


def test_rows_of_16_bits_are_multiplied_so_on_a_gpu_alone():
    half = dataclasses.replace(SMALL, bytes_each=2)
    assert size(half, "unit rows") == size(SMALL, "unit rows")
    on_gpu = (250 + 2000) * 64 * 2 + 2000 * 64 * 4
    assert size(dataclasses.replace(half, gpu=True), "unit rows") == on_gpu


def test_scores_are_kept_by_one_process_alone():
    def panel(loss, ranks):
        return size(Plan(40_000, 64, ranks=ranks, loss=loss), "panel")

    assert panel("info_nce symmetric", 4) == panel("info_nce", 4)
    assert panel("info_nce symmetric", 1) > panel("info_nce", 1)


def test_a_panel_of_few_scores_has_them_all():
    """And the candidates once more, packed."""
    assert size(Plan(40, 64, columns=3), "panel") == 4 * (40 * 80 + 80 * 64)


def test_only_the_micro_batch_grows_with_the_micro_batch():
    asked = dataclasses.replace(SMALL, parameters=1000, layers=2, hidden=64, heads=4, tokens=16)
    wide = dataclasses.replace(asked, micro_batch_size=16)
    for (part, one, _), (_, two, _) in zip(memory(asked), memory(wide), strict=True):
        assert two == (2 * one if part == "micro-batch" else one)


def test_the_graph_of_a_micro_batch():
    """s b h (34 + 5 a s / h) bytes a layer of 16 bits."""
    shape = {"parameters": 1000, "layers": 3, "hidden": 64, "heads": 4, "tokens": 16}
    wanted = 3 * 16 * 8 * (34 * 64 + 5 * 4 * 16)
    for bytes_each in (2, 4):
        asked = dataclasses.replace(SMALL, **shape, bytes_each=bytes_each)
        assert size(asked, "micro-batch") == wanted * bytes_each / 2


def test_a_panel_on_a_gpu():
    """Two matrices in float32 and one in the type of the rows, of as many scores as it may have."""
    few = Plan(batch_size=100, dim=8, gpu=True)
    assert size(few, "panel") == 100 * 100 * (4 + 4 + 4)
    assert size(dataclasses.replace(few, bytes_each=2), "panel") == 100 * 100 * (4 + 4 + 2)
    most = dataclasses.replace(few, batch_size=10**6)
    assert size(most, "panel") == 3 * panels.LARGEST_PANEL


def test_a_report_says_bytes_by_the_thousand():
    asked = dataclasses.replace(SMALL, parameters=10**5, layers=1, hidden=8, heads=1, ranks=3)
    units = {unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))}
    said = re.findall(r"^  .{20} *([\d.]+) (\wB|B)\b", report(asked, 1e6), re.MULTILINE)
    parts = [count for _, count, _ in memory(asked)]
    wanted = [*parts, sum(parts), dense(asked)]
    found = [float(number) * units[unit] for number, unit in said]
    assert found == pytest.approx(wanted, rel=0.5 * 10**-3)  # four digits
    assert [planning._size(count) for count in (999, 1000, 1023, 2 * 10**15)] == [
        *("999 B", "1 kB", "1.023 kB", "2,000 TB")
    ]


# Products of a gathered batch and on a ring; of every loss: tests/engine/test_products.py.
COUNTED = [
    ("info_nce", 3, 4),
    ("info_nce symmetric", 4, 4),
    ("nt_xent", 3, 5),
    ("full_triplet", 1, 1),
]


@pytest.mark.parametrize(("loss", "gathered", "ring"), COUNTED)
def test_least_time(loss, gathered, ring):
    encoder = {"parameters": 1000, "looked_up": 400, "layers": 1, "hidden": 8, "heads": 2}
    asked = dataclasses.replace(SMALL, loss=loss, tokens=16, **encoder)
    found = {stage: seconds for stage, seconds, _ in times(asked, rate=1e6, bandwidth=1e9)}
    assert found["loss"] == pytest.approx(gathered * 2 * 250 * 2000 * 64 / 1e6)
    around = dataclasses.replace(asked, exchange="ring")
    found_ring = {stage: seconds for stage, seconds, _ in times(around, rate=1e6)}
    assert found_ring["loss"] == pytest.approx(ring * 2 * 250 * 2000 * 64 / 1e6)
    assert found["encode"] == pytest.approx(2 * 600 * 16 * 750 / 1e6)
    assert found["encode again"] == pytest.approx(3 * found["encode"])
    assert found["exchange"] == pytest.approx(1500 * 64 * 8 / 1e9)
    assert "total" in report(asked, 1e6)


def test_a_ring_hides_what_travels_behind_the_products():
    """Forward: a product and the embeddings; backward: the rest, embeddings again, gradients."""
    around = dataclasses.replace(SMALL, exchange="ring", bytes_each=2)
    product, others = 2 * 250 * 2000 * 64, 1500 * 64
    assert rounds(around) == [(product, 2 * others), (3 * product, 6 * others)]
    for rate, bandwidth in ((1e6, 1e9), (1e12, 1e6), (3e9, 4e7)):
        found = {stage: seconds for stage, seconds, _ in times(around, rate, bandwidth)}
        both = found["loss"] + found["exchange"]
        forward = max(product / rate, 2 * others / bandwidth)
        assert both == pytest.approx(forward + max(3 * product / rate, 6 * others / bandwidth))
    gathered = dataclasses.replace(SMALL, bytes_each=2)  # gradients travel in float32
    assert rounds(gathered) == [(product, 2 * others), (2 * product, 4 * others)]


@pytest.mark.parametrize(
    ("sharding", "numbers"),
    [("none", 4), ("zero1", 2 + 2 / 4), ("zero2", 1 + 3 / 4), ("zero3", 1), ("fsdp", 2 + 3 / 4)],
)
def test_memory_of_a_sharded_encoder(sharding, numbers):
    """Of weights, gradients and two states, what four ranks share; FSDP2 gathers two of them."""
    encoder = {"parameters": 1000, "layers": 1, "hidden": 8, "heads": 2}
    asked = dataclasses.replace(SMALL, sharding=sharding, **encoder)
    assert size(asked, "encoder") + size(asked, "gathered") == pytest.approx(4000 * numbers)
    alone = dataclasses.replace(asked, ranks=1)
    assert size(alone, "encoder") == 16_000


def test_the_loss_takes_what_was_measured():
    """Measured by `fastsim bench` beyond inputs and gradients; the plan says at most."""
    files = (Path(__file__).parents[2] / "bench/results").glob("*/losses*.jsonl")
    most = {}  # of all machines
    for row in (row for file in files for row in results.read(file)[1] if "rise MB" in row):
        if row["implementation"] == "fastsim cpu" and row["loss"] in PRODUCTS:
            call = row["loss"], row["rows"], row["width"]
            most[call] = max(row["rise MB"], most.get(call, 0.0))
    assert most
    for (loss, rows, width), measured in most.items():
        asked = Plan(batch_size=rows, dim=width, loss=loss)
        planned = (size(asked, "unit rows") + size(asked, "panel")) / 2**20
        assert measured <= planned, loss
        # A small batch takes less than a whole panel.
        assert rows < 8192 or planned <= 4 * measured, loss


def test_estimates_say_that_they_are_some():
    asked = Plan(batch_size=1000, dim=64, gpu=True, bytes_each=2)
    by_backend = {name: seconds for name, seconds, _ in estimates(asked, 1e9, 1e9)}
    products = 3 * 2 * 1000 * 1000 * 64 / 1e9
    for name, seconds in by_backend.items():
        assert seconds == pytest.approx(products + PANEL_BYTES[name] * 1e6 / 1e9)
    text = report(asked, 1e9, memory_rate=1e9)
    assert "the loss by backend, calculated and not measured" in text
    assert "memory of the torch backend" in text
    assert "calculated" not in report(asked, 1e9)


def test_a_report_counts_the_processes_whose_candidates_are_held():
    for ranks, held in ((2, 2), (3, 3), (8, 3)):
        asked = dataclasses.replace(SMALL, ranks=ranks, exchange="ring")
        assert f"of {held} processes at a time" in report(asked, 1e9)
        assert f"width 64, {ranks} processes; for each process:" in report(asked, 1e9)
    assert "width 64, 1 process; for" in report(dataclasses.replace(SMALL, ranks=1), 1e9)


def test_a_measured_rate_is_of_multiplications_and_additions(monkeypatch):
    now, made = [0.0], []

    def product(x, y):
        now[0] += 0.125
        made.append(2 * x.shape[0] * x.shape[1] * y.shape[1])

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    monkeypatch.setattr(planning.time, "perf_counter", lambda: now[0])
    assert measured_rate("cpu") == made[-1] / 0.125


def test_the_shape_of_an_encoder_is_in_its_folder(tmp_path):
    """No weights are there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=40)
    config.save_pretrained(tmp_path)
    count = sum(p.numel() for p in transformers.BertModel(config).parameters())
    assert encoder_shape(str(tmp_path)) == {
        **{"dim": 24, "parameters": count, "looked_up": 50 * 24},
        **{"layers": 3, "hidden": 24, "heads": 4},
    }


def test_the_shape_is_of_what_is_trained(tmp_path):
    """Of T5 the encoder alone, and the width that the last layer of the head gives."""
    transformers = pytest.importorskip("transformers")
    from fastsim.encoders.encoder import Dense, Encoder, Normalize
    from tests import models

    sizes = {"vocab_size": 50, "d_model": 24, "d_kv": 6, "num_layers": 3, "num_heads": 4}
    config = transformers.T5Config(**sizes, d_ff=40)
    config.save_pretrained(tmp_path / "t5")
    encoder = transformers.T5EncoderModel(config)
    assert encoder_shape(str(tmp_path / "t5")) == {
        **{"dim": 24, "parameters": encoder.num_parameters(), "looked_up": 50 * 24},
        **{"layers": 3, "hidden": 24, "heads": 4},
    }
    plain = Encoder.from_pretrained(models.tiny_bert())
    head = [Dense(32, 16), Dense(16, 8), Normalize()]
    Encoder(plain.model, plain.tokenizer, head=head).save_pretrained(tmp_path / "dense")
    shape = encoder_shape(str(tmp_path / "dense"))
    assert (shape["dim"], shape["hidden"]) == (8, 32)


def test_the_shape_of_an_adapter_is_that_of_its_base(tmp_path):
    pytest.importorskip("peft")
    from fastsim.encoders.encoder import Encoder
    from tests import models

    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.add_lora(2)
    encoder.model.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert encoder_shape(str(tmp_path)) == encoder_shape(str(models.tiny_bert()))


def test_a_folder_without_a_shape_is_no_model(tmp_path):
    pytest.importorskip("transformers")
    from fastsim.encoders.names import ModelError

    for text in (None, "{}", '{"model_type": "bert", "hidden_size": "x"}'):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=f"^model: '{tmp_path}' cannot be loaded: "):
            encoder_shape(str(tmp_path))


def test_the_command(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    from click.testing import CliRunner

    from fastsim.cli import main as cli
    from tests import models

    arguments = ["plan", "--batch-size", "65536", "--ranks", "8", "--rate", "100", "--gpu"]
    result = CliRunner().invoke(cli.main, [*arguments, "--model", str(models.tiny_bert())])
    assert result.exit_code == 0, result.output
    for part in ("65,536 candidates of width 32", "encoder", "micro-batch", "candidates (gather)"):
        assert part in result.output
    assert "at 100 TFLOP/s" in result.output
    asked = []
    monkeypatch.setattr(planning, "report", lambda *numbers: asked.append(numbers) or "")
    more = ["--dim", "8", "--bits", "16", "--bandwidth", "50", "--memory-rate", "3"]
    CliRunner().invoke(cli.main, [*arguments, *more, "--model", str(models.tiny_bert())])
    ((plan, *rates),) = asked
    assert rates == [100e12, 50e9, 3e12]
    assert (plan.batch_size, plan.ranks, plan.dim, plan.bytes_each) == (65536, 8, 8, 2)
    assert (plan.hidden, plan.gpu) == (32, True)
    for name in ("--rate", "--bandwidth", "--memory-rate"):
        for number in ("nan", "inf", "0"):
            result = CliRunner().invoke(cli.main, [*arguments, name, number])
            assert result.exit_code == 2, result.output
            assert f"'{name}': " in result.stderr


def test_the_time_of_a_gpu_is_not_a_cpus(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    from click.testing import CliRunner

    from fastsim.cli import main as cli
    from tests import models

    def planned(*more):
        arguments = ["plan", "--batch-size", "100", "--model", str(models.tiny_bert())]
        result = CliRunner().invoke(cli.main, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert "panel" in result.output
        return result.output

    rates = {"cpu": 2e12, "cuda": 3e14}
    asked = []
    monkeypatch.setattr(
        planning, "measured_rate", lambda *given: asked.append(given) or rates[given[0]]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = planned("--gpu", "--bandwidth", "50", "--memory-rate", "3")
    assert "no time: there is no GPU here" in said
    assert "--rate" in said
    assert re.findall(r"[\d.]+ s\b|FLOP/s,", said) == asked == []
    assert "at 5 TFLOP/s" in planned("--gpu", "--rate", "5")
    assert "at 2 TFLOP/s" in planned("--bits", "16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "at 300 TFLOP/s" in planned("--gpu")
    assert "at 300 TFLOP/s" in planned("--gpu", "--bits", "16")
    float32, bfloat16 = torch.float32, torch.bfloat16
    assert asked == [("cpu", float32), ("cuda", float32), ("cuda", bfloat16)]


def test_pickled_weights_of_a_dense_layer_need_a_flag(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    from click.testing import CliRunner

    from fastsim.cli import main as cli
    from fastsim.encoders.encoder import Encoder
    from tests import models

    encoder = Encoder.from_pretrained(models.tiny_bert(), dense=4)
    encoder.save_pretrained(tmp_path / "model")
    (tmp_path / "model/2_Dense/model.safetensors").unlink()
    weights = encoder.head[0].state_dict()
    torch.save(weights, tmp_path / "model/2_Dense/pytorch_model.bin")
    command = ["plan", "--batch-size", "100", "--rate", "1", "--model", str(tmp_path / "model")]
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 4
    assert "(--allow-pickle) allows weights in pickle files" in result.stderr
    result = CliRunner().invoke(cli.main, [*command, "--allow-pickle"])
    assert result.exit_code == 0, result.output
    assert "100 candidates of width 4" in result.output
