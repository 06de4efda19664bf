"""``torch.compile`` of blocks and of whole models gives eager's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

from composable_fsdp import checkpoint, replicate
from tests.runtime.parity import trains_as
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    gpt_input,
    gpt_units,
    sgd,
    train,
)
from tests.support.world import World, fake_world

Compile = Callable[[nn.Module, str], None]


def in_place(model: nn.Module, backend: str) -> None:
    for block in blocks(model):
        block.compile(backend=backend)


def replaced(model: nn.Module, backend: str) -> None:
    """``model.blocks[i] = torch.compile(block)``."""
    holder: Any = model.get_submodule("blocks")
    for i, block in enumerate(holder):
        holder[i] = torch.compile(block, backend=backend)


def whole(model: nn.Module, backend: str) -> None:
    model.compile(backend=backend)


def blocks(model: nn.Module) -> list[nn.Module]:
    return [m for _, m in model.get_submodule("blocks").named_children()]


def count_graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled before, nothing kept after."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.few(1)
@pytest.mark.req("B-23")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", [in_place, replaced], ids=lambda h: str(h.__name__))
def test_compiled_blocks_are_one_graph(how: Compile, order: str, path: str) -> None:
    """One graph serves all blocks; no break, and nothing new in later steps."""
    around = path == "wrapper" and order == "after" and how in (replaced,)
    with fake_world(2) as world:
        model = build(path, how, order, "aot_eager")
        train(model, world.rank, gpt_input, sgd, steps=1)
        once = count_graphs()
        train(model, world.rank, gpt_input, sgd, steps=2)

    assert once == count_graphs()
    assert once == (1, int(around))


def build(path: str, how: Compile, order: str, backend: str) -> nn.Module:
    """A sharded GPT, compiled before or after sharding."""
    model = TinyGPT()
    if order == "before":
        how(model, backend)
    sharded = apply_units(model, gpt_units(model), path=path)
    if order == "after":
        how(sharded, backend)
    return sharded


@pytest.mark.req("B-23", "B-12")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [in_place, whole], ids=lambda h: str(h.__name__))
@on_ranks(2)
def test_compiled_models_train_as_the_plain_one(world: World, how: Compile) -> None:
    """Blocks, also checkpointed and replicated ones, or the whole model: three losses,
    bit by bit."""
    torch._dynamo.reset()
    plain, model = TinyGPT(layers=3), TinyGPT(layers=3)
    if how is in_place:
        checkpoint(model.blocks[0])
        replicate(model.blocks[1])
    how(model, "aot_eager")
    apply_units(model, ["blocks.0", "blocks.2"])

    trains_as(world, model, plain, gpt_input)
    torch._dynamo.reset()
