"""The package as a whole: what importing needs, backends, modules, the command line."""

import inspect
import os
import re
import subprocess
import sys

import pytest
import torch

import fastsim
from fastsim import losses
from fastsim.backends import get
from fastsim.backends.base import Backend
from fastsim.losses.module import PER_CALL, LossModule
from tests.backends.cpu.instruction_sets import SETS
from tests.measure import assert_close

MODULES = [m for m in vars(losses).values() if inspect.isclass(m) and issubclass(m, LossModule)]


def fresh(code):
    """Runs code in a fresh process; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_torch_and_numpy_alone():
    blocked = (
        "triton transformers sentence_transformers datasets accelerate scipy sklearn matplotlib"
        " click pandas open_clip pytorch_metric_learning"
    )
    code = (
        f"import sys\nfor name in {blocked.split()}: sys.modules[name] = None\n"
        "import fastsim, torch\nx = torch.randn(4, 8, requires_grad=True)\n"
        "fastsim.info_nce(x, x.flip(0)).backward()\nprint(x.grad.isfinite().all().item())"
    )
    assert fresh(code).strip() == "True"


def test_names_come_with_their_first_use():
    code = (
        "import fastsim, sys\nassert not {'torch', 'numpy'} & set(sys.modules)\n"
        "assert {'info_nce', 'Encoder', 'losses'} <= set(dir(fastsim))\n"
        "from fastsim import *\nprint(info_nce is losses.info_nce, top_k is fastsim.top_k)\n"
        "assert 'info_nce' in vars(fastsim)  # once found, a name is found without a search"
    )
    assert fresh(code).strip() == "True True"
    with pytest.raises(AttributeError, match="'fastsim' has no attribute 'info_nec'"):
        _ = fastsim.info_nec


def test_backends_is_the_function_whatever_is_imported_first():
    """The package of that name is imported by others, and takes its place in `fastsim`."""
    first = "from fastsim.losses import InfoNCE\nimport fastsim\n"
    code = "print(fastsim.backends()['eager'])"
    assert fresh(first + code).strip() == fresh("import fastsim\n" + code).strip() == "None"


# Each may be the first that is imported. Importing torch once a module would take minutes.
EACH_ALONE = """
import os, pathlib, sys, torch
kept = sys.modules.pop("torch")
import fastsim  # without its names, as where torch is not there yet
sys.modules["torch"] = kept
folder = pathlib.Path(fastsim.__file__).parent
for path in sorted(folder.iterdir()):
    if path.stem.startswith("_") or not (path.suffix == ".py" or (path / "__init__.py").is_file()):
        continue
    name = f"fastsim.{path.stem}"
    child = os.fork()
    if child == 0:
        __import__(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name)
print("imported")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
def test_any_module_of_the_package_may_be_imported_first():
    assert fresh(EACH_ALONE).strip() == "imported"


@pytest.mark.parametrize("asked", [["--help"], ["--version"], ["train", "--help"]])
def test_the_command_line_answers_without_torch(asked):
    """The time follows: what is imported is click and files of options."""
    pytest.importorskip("click", reason="the command line needs click")
    code = (
        "import sys\nfor name in ('torch', 'numpy', 'transformers'): sys.modules[name] = None\n"
        f"from fastsim.cli.main import main\nmain({asked!r}, prog_name='fastsim')"
    )
    assert "fastsim" in fresh(code)


@pytest.mark.parametrize(("typed", "offered"), [("se", "search"), ("search --co", "--corpus")])
def test_the_shell_completes_commands_and_options(typed, offered):
    pytest.importorskip("click", reason="the command line needs click")
    words = ["fastsim", *typed.split()]
    asked = {"_FASTSIM_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words)}
    asked["COMP_CWORD"] = str(len(words) - 1)
    command = [sys.executable, "-c", "from fastsim.cli.main import main; main(prog_name='fastsim')"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | asked)
    assert f"plain,{offered}" in done.stdout.splitlines()


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_a_module_has_its_functions_parameters(module):
    function = inspect.signature(module.function).parameters.values()
    wanted = [p for p in function if p.kind is p.KEYWORD_ONLY and p.name not in PER_CALL]
    got = list(inspect.signature(module).parameters.values())
    assert [(p.name, p.default) for p in got] == [(p.name, p.default) for p in wanted]
    instance = module()
    assert all(getattr(instance, p.name) == p.default for p in wanted)
    assert module.function in vars(losses).values()


def test_a_module_learns_and_saves_its_temperature():
    leaf = torch.nn.Parameter(torch.tensor(0.1))
    module = losses.InfoNCE(temperature=leaf)
    assert list(module.state_dict()) == ["temperature"]
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    module(x, y).backward()
    (wanted,) = torch.autograd.grad(losses.info_nce(x, y, temperature=leaf), leaf)
    torch.testing.assert_close(module.temperature.grad, wanted)
    assert wanted != 0
    ids = torch.arange(5)
    assert torch.equal(module(x, y, exclude=(ids, ids)), module(x, y))


FURTHER = ("directions", "own_negatives", "references")  # their logits are one matrix


@pytest.mark.parametrize("function", losses.SPECIFICATIONS)
def test_a_specification_has_its_losses_parameters(function):
    of_scores = ("backend", "group", "levels", "similarity", "average", *FURTHER)  # what makes them
    options = {
        name: p.default
        for name, p in inspect.signature(function).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name not in of_scores
    }
    dense = inspect.signature(losses.SPECIFICATIONS[function]).parameters
    assert {name: dense[name].default for name in options} == options


def test_everything_public_has_a_docstring():
    for name in fastsim.__all__:
        assert inspect.getdoc(getattr(fastsim, name)), name
    for module in MODULES:
        assert inspect.getdoc(module), module


@pytest.mark.parametrize("name", [name for name in fastsim.backends() if name != "eager"])
def test_a_backend_takes_what_the_engine_gives(name):
    """Also where the machine cannot run it."""
    kind = type(get(name))
    for method, base in inspect.getmembers(Backend, inspect.isfunction):
        assert inspect.signature(getattr(kind, method)) == inspect.signature(base), method


def test_backends(monkeypatch, usable):
    assert fastsim.backends()["eager"] is None
    usable("cpu")
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="backend: wanted one of"), fastsim.use_backend("fast"):
        pass
    meta = torch.empty(3, 4, device="meta")
    with fastsim.use_backend("cpu"), pytest.raises(RuntimeError, match="it serves CPU tensors"):
        fastsim.cosine_similarity(meta)
    monkeypatch.setenv("FASTSIM_BACKEND", "cpu")
    with pytest.raises(RuntimeError, match="it serves CPU tensors"):
        fastsim.cosine_similarity(meta)
    with fastsim.use_backend("auto"):
        assert fastsim.cosine_similarity(meta).shape == (3, 3)
    monkeypatch.setenv("FASTSIM_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="got 'nonsense'"):
        fastsim.cosine_similarity(x)


def test_without_the_extension_the_reason_is_named():
    code = (
        "import pathlib\nis_file = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda p: p.name != 'cpu.so' and is_file(p)\n"
        "import fastsim, torch\nprint(fastsim.backends()['cpu'])\n"
        "print(fastsim.info_nce(torch.randn(4, 3), torch.randn(4, 3)).isfinite().item())"
    )
    reason, works = fresh(code).splitlines()
    assert "was not built" in reason
    assert "FASTSIM_BUILD=cpu" in reason
    assert works == "True"


@pytest.mark.parametrize("backend", fastsim.backends())
def test_top_k(backend, usable):
    usable(backend)
    apart = 0.0
    while apart < 1e-5:  # scores that a rounding could swap have no order in float32
        x, y = torch.randn(9, 5), torch.randn(300, 5)
        y[200:] = y[:100]
        scores = _cosines(x.double(), y.double())
        best = scores[:, :200].topk(8).values
        apart = (best[:, :-1] - best[:, 1:]).min().item()
    values, indices = fastsim.top_k(x, y, 7, backend=backend)
    for row in range(9):
        order = sorted(range(300), key=lambda j: (-scores[row, j % 200].item(), j))[:7]
        assert indices[row].tolist() == order
    _assert_scores(values, indices, x, y)


def test_top_k_over_many_blocks(small_panels, usable):
    usable("cpu")
    x, y = torch.randn(50, 6), torch.randn(333, 6)
    for k in (1, 40, 333):
        values, indices = fastsim.top_k(x, y, k, backend="cpu")
        _, places = fastsim.top_k(x, y, k, backend="eager")
        _assert_scores(values, indices, x, y)
        assert (indices == places).float().mean() > 0.99  # scores a rounding apart may swap


def _cosines(x, y):
    x, y = (rows / rows.square().sum(1, keepdim=True).sqrt() for rows in (x, y))
    return (x[:, None] * y).sum(2)


def _assert_scores(values, indices, x, y):
    """The values are the cosines of x with the rows of y that indices (N, k) name."""
    truth, dense = (
        _cosines(*sides).gather(1, indices) for sides in ((x.double(), y.double()), (x, y))
    )
    assert_close("scores", values, truth, dense, torch.float32)


@pytest.mark.parametrize("command", [["-m", "fastsim", "info"]])
def test_info(command):
    pytest.importorskip("click", reason="the command line needs click")
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert re.search(rf"fastsim {fastsim.__version__}", done.stdout)
    assert torch.__version__ in done.stdout
    for name, reason in fastsim.backends().items():
        wanted = "usable" if reason is None else reason
        assert re.search(rf"{name} +.*{re.escape(wanted)}", done.stdout)


def test_instruction_sets_agree(usable, tmp_path):
    """Each compiled instruction set that this processor has gives the same loss to rounding."""
    usable("cpu")
    torch.save((torch.randn(70, 33), torch.randn(90, 33)), tmp_path / "inputs.pt")
    # Each in a process of its own, which has imported torch before it was forked.
    code = f"""
import multiprocessing, os, sys, torch
def run(wanted):
    os.environ["FASTSIM_INSTRUCTION_SET"] = wanted
    import fastsim
    x, y = torch.load({str(tmp_path / "inputs.pt")!r})
    x.requires_grad_()
    loss = fastsim.info_nce(x, y, symmetric=True, backend="cpu")
    loss.backward()
    found = torch.ops.fastsim_cpu.instruction_set(), loss.item(), x.grad.norm().item()
    print(*found, flush=True)
for wanted in {SETS!r}:
    process = multiprocessing.get_context("fork").Process(target=run, args=(wanted,))
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    results = [line.split() for line in fresh(code).splitlines()]
    assert len(results) == len(SETS)
    assert results[-1][0] == SETS[-1]
    losses_, norms = zip(*((float(r[1]), float(r[2])) for r in results), strict=True)
    assert losses_ == pytest.approx([losses_[0]] * len(SETS), rel=1e-6)
    assert norms == pytest.approx([norms[0]] * len(SETS), rel=1e-6)


def test_an_instruction_set_that_is_none(usable):
    usable("cpu")
    environment = os.environ | {"FASTSIM_INSTRUCTION_SET": "AVX2"}
    command = [sys.executable, "-c", "from fastsim.backends import get; get('cpu').note()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert re.search(r"FASTSIM_INSTRUCTION_SET: wanted .*, got AVX2", done.stderr)


def test_info_tells_of_the_other_project_of_this_name(monkeypatch):
    from importlib import metadata

    from fastsim.cli import info

    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "3.1.0" if name == "fastsim" else real(name)
    )
    assert "the distribution fastsim 3.1.0. The two overwrite" in info.report()
    monkeypatch.undo()
    if "fastsim" not in {d.metadata["Name"] for d in metadata.distributions()}:
        assert "is installed too" not in info.report()


def functions_of_the_public_surface():
    public = {getattr(fastsim, name) for name in fastsim.__all__} | set(losses.SPECIFICATIONS)
    public |= set(losses.SPECIFICATIONS.values())
    return sorted(filter(inspect.isfunction, public), key=lambda function: function.__name__)


@pytest.mark.parametrize("function", functions_of_the_public_surface(), ids=lambda f: f.__name__)
def test_public_functions_are_annotated(function):
    """Every argument and the result; that the types are right is for mypy and tests/typed."""
    signature = inspect.signature(function)
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not bare
    assert signature.return_annotation is not signature.empty
