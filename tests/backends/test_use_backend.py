"""`use_backend`: the innermost block that is open, in whatever order blocks end."""

import asyncio
import threading
from contextlib import ExitStack

import pytest
import torch

import fastsim
from fastsim.backends import default_name


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_end_in_any_order(order):
    """Those of tasks that take turns on a thread, or that a generator holds open."""
    kept = default_name()
    blocks, names = [ExitStack(), ExitStack()], ["torch", "eager"]
    for block, name in zip(blocks, names, strict=True):
        block.enter_context(fastsim.use_backend(name))
    assert default_name()[0] == "eager"
    blocks[order[0]].close()
    assert default_name()[0] == names[order[1]]
    blocks[order[1]].close()
    assert default_name() == kept


def test_one_name_twice():
    """A block ends itself, and not another of its name."""
    with fastsim.use_backend("torch"), fastsim.use_backend("eager"):
        inner = fastsim.use_backend("torch")
        inner.__enter__()
        assert default_name()[0] == "torch"
        inner.__exit__(None, None, None)
        assert default_name()[0] == "eager"


def test_after_tasks_that_overlap():
    kept = default_name()
    turn = asyncio.Event

    async def task(name, begins, ends):
        await begins.wait()
        with fastsim.use_backend(name):
            ends.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def main():
        first, second, third = turn(), turn(), turn()
        first.set()
        await asyncio.gather(task("torch", first, second), task("eager", second, third))

    asyncio.run(main())
    assert default_name() == kept


def test_other_threads_have_their_own():
    seen = []
    with fastsim.use_backend("eager"):
        thread = threading.Thread(target=lambda: seen.append(default_name()[0]))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_compiled_code_follows_the_block():
    """Inside of what is compiled and around it; a block of another name compiles anew."""
    graphs = []

    def note(graph, _):
        graphs.append(graph.code)
        return graph.forward

    def within(x, y):
        with fastsim.use_backend("eager"):
            return fastsim.info_nce(x, y)

    x, y = torch.randn(2, 5, 8)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(within, fullgraph=True, backend=note)(x, y),
        fastsim.info_nce(x, y, backend="eager"),
    )
    plain = torch.compile(lambda x, y: fastsim.info_nce(x, y), fullgraph=True, backend=note)
    for name in ("eager", "torch", "eager"):
        with fastsim.use_backend(name):
            torch.testing.assert_close(plain(x, y), fastsim.info_nce(x, y))
    assert len(graphs) == 3
    assert graphs[0] == graphs[1] != graphs[2]
