"""``torch.compile`` of blocks and of whole models gives eager's numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor as inductor
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

from composable_fsdp import checkpoint, fully_shard, replicate
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.reference import (
    PATHS,
    apply_units,
    gpt_input,
    gpt_units,
    sgd,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import RankPool, World, fake_world

RankCount = Callable[[int], RankPool]
Compile = Callable[[nn.Module, str], None]


def in_place(model: nn.Module, backend: str) -> None:
    """``block.compile()``."""
    for block in blocks(model):
        block.compile(backend=backend)


def fullgraph(model: nn.Module, backend: str) -> None:
    """``block.compile(fullgraph=True)``: a break would be an error."""
    for block in blocks(model):
        block.compile(backend=backend, fullgraph=True)


def forwards(model: nn.Module, backend: str) -> None:
    """``block.forward = torch.compile(block.forward)``."""
    for block in blocks(model):
        block.forward = torch.compile(block.forward, backend=backend)


def replaced(model: nn.Module, backend: str) -> None:
    """``model.blocks[i] = torch.compile(block)``."""
    holder: Any = model.get_submodule("blocks")
    for i, block in enumerate(holder):
        holder[i] = torch.compile(block, backend=backend)


def whole(model: nn.Module, backend: str) -> None:
    """``model.compile()``."""
    model.compile(backend=backend)


BLOCKWISE = [in_place, fullgraph, forwards, replaced]


def blocks(model: nn.Module) -> list[nn.Module]:
    """What stands in the places of the blocks, wrappers included."""
    return [m for _, m in model.get_submodule("blocks").named_children()]


def count_graphs() -> tuple[int, int]:
    """Graphs captured and breaks counted since the last reset."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled before, nothing kept after."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.few(2)
@pytest.mark.req("B-23")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", BLOCKWISE, ids=lambda h: str(h.__name__))
def test_compiled_blocks_are_one_graph(how: Compile, order: str, path: str) -> None:
    """One graph serves all blocks; no break, and nothing new in later steps.

    A wrapper that is compiled itself breaks at the hooks of the module it holds.
    """
    around = path == "wrapper" and order == "after" and how in (forwards, replaced)
    with fake_world(2) as world:
        model = build(path, how, order, "aot_eager")
        train(model, world.rank, gpt_input, sgd, steps=1)
        once = count_graphs()
        train(model, world.rank, gpt_input, sgd, steps=2)

    assert once == count_graphs()
    assert once == (1, int(around))


def build(path: str, how: Compile | None, order: str, backend: str) -> nn.Module:
    """A sharded GPT, compiled before or after sharding."""
    model = TinyGPT()
    if how is not None and order == "before":
        how(model, backend)
    sharded = apply_units(model, gpt_units(model), path=path)
    if how is not None and order == "after":
        how(sharded, backend)
    return sharded


def train_compiled(
    world: World, path: str, how: Compile, order: str, backend: str
) -> tuple[list[float], list[float]]:
    """Losses of three steps, compiled and eager."""
    torch._dynamo.reset()
    found = []
    for used in (how, None):
        model = build(path, used, order, backend)
        found.append(train(model, world.rank, gpt_input, sgd))
    torch._dynamo.reset()
    return found[0], found[1]


@pytest.mark.few(2)
@pytest.mark.req("B-23")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "how", [in_place, replaced, whole], ids=lambda h: str(h.__name__)
)
def test_compiled_models_train_as_eager(
    ranks: RankCount, how: Compile, order: str, path: str
) -> None:
    """Blocks, or the whole model: three losses, bit by bit."""
    for losses, expected in ranks(2).run(train_compiled, path, how, order, "aot_eager"):
        assert losses == expected
        assert len(set(losses)) == 3


def train_by_inductor(world: World) -> tuple[list[float], list[float]]:
    """Two steps of a small MLP, one unit, compiled to machine code, and eager."""
    torch._dynamo.reset()
    found = []
    # Precompiled headers take minutes, to save seconds of the next kernels.
    with inductor.config.patch("cpp_cache_precompile_headers", False):
        for compiled in (True, False):
            model = fully_shard(tiny_mlp())
            if compiled:
                model.compile(backend="inductor")
            found.append(train(model, world.rank, wide_input(8), sgd, steps=2))
    torch._dynamo.reset()
    return found[0], found[1]


@pytest.mark.req("B-23")
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_model_compiled_by_inductor_trains_as_eager(ranks: RankCount) -> None:
    """Fused kernels round differently: within a hundred-thousandth."""
    for losses, expected in ranks(2).run(train_by_inductor, timeout=380.0):
        assert losses == pytest.approx(expected, rel=1e-5)


def train_composed(world: World) -> tuple[list[float], list[float]]:
    """A checkpointed and a replicated block, compiled, against eager and unsharded."""
    torch._dynamo.reset()
    plain, model = TinyGPT(), TinyGPT()
    checkpoint(model.blocks[0])
    replicate(model.blocks[1])
    in_place(model, "aot_eager")
    apply_units(model, ["blocks.0"])
    losses = train(model, world.rank, gpt_input, sgd)
    expected = train_reference(plain, world.world_size, gpt_input, sgd)
    torch._dynamo.reset()
    return losses, [step[world.rank] for step in expected]


@pytest.mark.req("B-23", "B-12")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_may_be_checkpointed_or_replicated(ranks: RankCount) -> None:
    """The losses of the plain model, bit by bit."""
    for losses, expected in ranks(2).run(train_composed, timeout=110.0):
        assert losses == expected
