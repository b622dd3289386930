"""What options make of the model and of its forward pass: precision, additions, recomputation."""

import contextlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from safetensors.torch import load_file
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from transformers.models.bert.modeling_bert import BertAttention

from fastsim.encoders.encoder import Encoder
from fastsim.training.collator import Collator
from fastsim.training.objectives import Objective
from fastsim.training.prepare import prepare
from fastsim.training.run import train
from tests import models
from tests.training.runs import options

LAYERS = 2  # of the tiny BERT, an attention in each
LOSSES = {"bi-encoder": ("tuples", "info_nce"), "cross-encoder": ("scored pairs", "regression")}


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


@contextlib.contextmanager
def calls_of(kind, register=register_module_forward_pre_hook):
    """The calls of modules of a kind in training mode.

    Their results with `register_module_forward_hook`, which does not see a layer that is run again
    only as far as its gradient needs it.
    """
    found = []

    def note(module, given, result=None):
        if isinstance(module, kind) and module.training:
            found.append(result)

    handle = register(note)
    try:
        yield found
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("architecture", "micro_batch_size"),
    [("bi-encoder", None), ("bi-encoder", 3), ("cross-encoder", None)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_and_loss_run_in_the_precision_asked(
    precision, architecture, micro_batch_size, files, tmp_path, monkeypatch
):
    """The weights stay float32: autocast takes copies of them."""
    kind, loss = LOSSES[architecture]
    file, _ = files(kind)
    casts, forward = [], Objective.forward

    def watched(self, *arguments):
        casts.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return forward(self, *arguments)

    asked = options(tmp_path, file, loss=loss, max_steps=2, precision=precision)
    asked.architecture, asked.micro_batch_size = architecture, micro_batch_size
    monkeypatch.setattr(Objective, "forward", watched)
    with calls_of(torch.nn.Linear, register_module_forward_hook) as results:
        train(asked)
    half = precision == "bf16"
    assert {result.dtype for result in results} == {torch.bfloat16 if half else torch.float32}
    if architecture == "bi-encoder":
        assert casts[-2:] == [half and torch.bfloat16] * 2
    assert {value.dtype for value in weights(asked.output).values()} == {torch.float32}


def gradients(asked):
    """(gradients of a batch by name, how often a layer ran) of the model as it is prepared."""
    task = prepare(asked)
    model = task.model.train()
    rows = [task.train[row] for row in range(8)]
    batch = Collator(task.encoder, task.layout, cross=False)(rows)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)  # of the dropout
    with calls_of(BertAttention) as layers:
        found = torch.autograd.grad(model(**batch)["loss"], parameters.values(), allow_unused=True)
    return dict(zip(parameters, found, strict=True)), len(layers)


@pytest.mark.parametrize("lora", [None, 2])
def test_a_checkpoint_runs_each_layer_again_for_the_same_gradient(lora, files, tmp_path):
    """With additions too, where nothing before the first of them is trained."""
    if lora:
        pytest.importorskip("peft")
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", lora=lora)
    plain, once = gradients(asked)
    asked.gradient_checkpointing = True
    again, twice = gradients(asked)
    columns = 2
    assert (once, twice) == (LAYERS * columns, 2 * LAYERS * columns)
    assert plain.keys() == again.keys()
    trained = [name for name, value in plain.items() if value is not None]
    assert trained
    for name, value in plain.items():
        assert (value is None) == (again[name] is None)
        assert value is None or torch.equal(value, again[name])


def test_a_run_with_checkpoints_in_its_layers_trains_the_same_weights(files, tmp_path):
    file, _ = files("tuples")
    found = []
    for name, checkpointed in (("plain", False), ("again", True)):
        asked = options(tmp_path, file, loss="info_nce", max_steps=2, output=str(tmp_path / name))
        asked.gradient_checkpointing = checkpointed
        with calls_of(BertAttention) as layers:
            train(asked)
        found.append((weights(asked.output), len(layers)))
    (plain, once), (again, twice) = found
    assert twice == 2 * once
    assert all(torch.equal(value, again[name]) for name, value in plain.items())


def test_additions_of_the_rank_asked_are_all_that_is_trained(files, tmp_path):
    """Besides a new layer of the head and the loss's own numbers."""
    pytest.importorskip("peft")
    file, _ = files("tuples")
    rank = 3
    asked = options(tmp_path, file, loss="info_nce", lora=rank, dense=8, learn=("temperature",))
    model = prepare(asked).model
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    additions = {name for name in trained if ".lora_" in name}
    linear = [module for module in model.encoder.model.modules() if hasattr(module, "lora_A")]
    assert linear
    assert len(additions) == 2 * len(linear)
    assert all(rank in trained[name] for name in additions)
    head = {"encoder.head.0.linear.weight", "encoder.head.0.linear.bias"}
    assert trained.keys() - additions == head | {"objective.learnt.temperature"}


def test_additions_change_linear_layers_by_their_rank_and_nothing_else(files, tmp_path):
    pytest.importorskip("peft")
    file, _ = files("tuples")
    rank = 3
    asked = options(tmp_path, file, loss="info_nce", lora=rank, max_steps=5, learning_rate=0.1)
    train(asked)
    # Of the models: in files, transformers 5.5 has other names for the layers' norms.
    before, after = (
        Encoder.from_pretrained(folder).model.state_dict()
        for folder in (models.tiny_bert(), asked.output)
    )
    assert before.keys() == after.keys()
    eps, changed = torch.finfo(torch.float32).eps, set()
    for name, value in before.items():
        moved = after[name].double() - value.double()
        if not moved.any():
            continue
        changed.add(name)
        # What a rounding of each sum may add to a singular value, at most its Frobenius norm.
        rounding = eps * (value.double().norm() + moved.norm())
        sizes = torch.linalg.svdvals(moved)
        assert sizes[rank - 1] > rounding >= sizes[rank]
    layers = {name for name in before if ".layer." in name and name.endswith("weight")}
    assert changed == {name for name in layers if "LayerNorm" not in name}


def test_the_transformer_is_compiled_as_a_whole_and_keeps_its_names(files, tmp_path, monkeypatch):
    """Traced without a compiler, its results are those of the plain run, bit for bit."""
    file, _ = files("tuples")
    compiled, called, compile_it = [], [], torch.compile

    def noted(function, **more):
        compiled.append(type(function.__self__).__name__)
        traced = compile_it(function, backend="eager", **more)

        def call(*arguments, **named):
            called.append(torch.is_grad_enabled())
            return traced(*arguments, **named)

        return call

    monkeypatch.setattr(torch, "compile", noted)
    found = []
    for name, compiles in (("plain", False), ("compiled", True)):
        asked = options(tmp_path, file, loss="info_nce", max_steps=1, output=str(tmp_path / name))
        asked.compile = compiles
        train(asked)
        assert bool(called) == compiles
        found.append(weights(asked.output))
    assert compiled == ["BertModel"]
    assert called.count(True) == 2  # columns
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
