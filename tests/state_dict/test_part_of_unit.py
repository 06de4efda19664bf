"""State dicts, and full parameters, of modules inside a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from composable_fsdp import (
    FullStateDictConfig,
    StateDictType,
    state_dict_type,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.state_dict import ShardedValue
from property_tests.live import batches, examples
from tests.support.models import TinyGPT, build, legal_units, module_at
from tests.support.on_ranks import on_ranks
from tests.support.recipes import ModelRecipe
from tests.support.reference import apply_units, differences
from tests.support.sharded import UNITS, both_paths, gpt
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def core_of(model: nn.Module) -> Any:
    """The module that a wrapper holds, or the module itself."""
    return getattr(model, "module", model)


class Net(nn.Module):
    """As Lightning has it: the module that is sharded holds the one that is saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = TinyGPT(seed=seed)
        self.scale = nn.Parameter(torch.ones(3))


def net(path: str) -> nn.Module:
    return apply_units(Net(), [f"net.{unit}" for unit in UNITS], path=path)


def same(got: Any, expected: dict[str, Tensor]) -> None:
    """Equal names in equal order, and values bit by bit."""
    assert differences(got, expected) == {}


class Interrupted(Exception):
    """Raised by a hook in the middle of a state dict."""


@pytest.mark.req("P-17")
@both_paths
@on_ranks(2)
def test_calls_inside_a_call_and_after_an_interrupted_call_have_whole_values(
    world: World, path: str
) -> None:
    """A part's state dict is whole, whichever other state dicts run or have failed."""
    model, plain = net(path), Net()
    core, inner = core_of(model), []

    def save_apart(*_: Any) -> None:
        inner.append(core.net.norm.state_dict(prefix="x."))
        inner.append(core.net.norm.state_dict())

    # The hook runs between the unit's pre-hook and the unit's hook, and fills dicts of
    # its own.
    handle = core.net.tokens.register_state_dict_pre_hook(save_apart)
    same(core.net.state_dict(), plain.net.state_dict())
    handle.remove()
    same(inner[0], plain.net.norm.state_dict(prefix="x."))
    same(inner[1], plain.net.norm.state_dict())

    def fail(*_: Any) -> None:
        raise Interrupted

    handle = core.net.head.register_state_dict_pre_hook(fail)
    with pytest.raises(Interrupted):
        core.net.state_dict()
    handle.remove()
    # Without the unit's module above the part, and with names that the failed call had.
    holder = nn.ModuleDict({"norm": core.net.norm})
    same(holder.state_dict(), nn.ModuleDict({"norm": plain.net.norm}).state_dict())
    same(core.net.norm.state_dict(), plain.net.norm.state_dict())
    same(core.net.state_dict(), plain.net.state_dict())


@pytest.mark.req("P-17")
@on_ranks(2)
def test_the_state_dict_of_a_part_follows_the_setting(world: World) -> None:
    """Sharded, on the first rank alone, by torch's functions, and inside a block."""
    model, plain = gpt("wrapper"), TinyGPT()
    norm, whole = core_of(model).norm, plain.norm.state_dict()

    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        values = norm.state_dict()
    assert all(isinstance(value, ShardedValue) for value in values.values())
    assert [tuple(value.shape) for value in values.values()] == [(8,), (8,)]
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        first = norm.state_dict()
    same(first, whole if world.rank == 0 else {})
    full = StateDictOptions(full_state_dict=True)
    same(get_model_state_dict(norm, options=full), whole)
    sharded = get_model_state_dict(norm)
    assert all(isinstance(value, ShardedValue) for value in sharded.values())
    with unshard_params(model):
        same(norm.state_dict(), whole)
    core = core_of(model)
    for module, gathers in ((core, 3), (core.blocks, 2), (core.head, 1), (norm, 1)):
        with record() as calls:
            module.state_dict()
        assert len(calls) == gathers, calls


@pytest.mark.req("P-17")
@both_paths
@on_ranks(2)
def test_a_part_loads_whole_values(world: World, path: str) -> None:
    """By ``load_state_dict``, torch's functions, shards, and ``unshard_params``."""
    other, model = TinyGPT(seed=5), gpt(path)
    core, full = core_of(model), StateDictOptions(full_state_dict=True)

    core.norm.load_state_dict(other.norm.state_dict())
    core.blocks.load_state_dict(other.blocks.state_dict())
    set_model_state_dict(core.head, other.head.state_dict(), options=full)
    donor = gpt(path, seed=5)
    with state_dict_type(donor, StateDictType.SHARDED_STATE_DICT):
        core.tokens.load_state_dict(core_of(donor).tokens.state_dict())
    with unshard_params(core.positions):
        assert core.positions.weight.shape == (6, 8)
        core.positions.weight.data.copy_(other.positions.weight)

    same(model.state_dict(), other.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for bias: copying a"):
        core.norm.load_state_dict({"weight": torch.ones(8), "bias": torch.ones(3)})


def check_every_module(world: World, recipes: list[ModelRecipe]) -> None:
    for recipe in recipes:
        plain, model = build(recipe), build(recipe)
        model = apply_units(model, legal_units(model, recipe.sharded))
        for path in recipe.paths():
            same(
                module_at(model, path).state_dict(),
                module_at(plain, path).state_dict(),
            )
            if shapes_of(module_at(plain, path)):
                with unshard_params(module_at(model, path)):
                    shown = shapes_of(module_at(model, path))
                assert shown == shapes_of(module_at(plain, path))


def shapes_of(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


@pytest.mark.req("P-17")
@examples(10)
@given(recipes=batches(model_recipes(2, 2, FEATURES - {"replicate"})))
def test_every_module_of_every_model_gives_whole_values(
    ranks: RankCount, recipes: list[ModelRecipe]
) -> None:
    """The state dict of each module is that of the plain model's module."""
    ranks(2).run(check_every_module, recipes)
