"""Types of state dict, and state dicts of modules inside a unit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from hypothesis import given
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    set_state_dict_type,
    state_dict_type,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.config import FULL_BY_DEFAULT
from composable_fsdp.errors import CompositionError
from composable_fsdp.state_dict import ShardedValue, get_state_dict_type
from property_tests.live import batches, examples
from tests.optim.test_dcp_optim import trained
from tests.support.memory import LiveBytes
from tests.support.models import TinyGPT, build, legal_units, module_at, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recipes import ModelRecipe
from tests.support.reference import adamw, apply_units, differences
from tests.support.sharded import UNITS, both_paths, gpt, message_of, step
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool, World, fake_world

FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
ON_FIRST = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
OPTIM_ON_FIRST = FullOptimStateDictConfig(rank0_only=True)


def test_a_block_sets_the_type_of_every_unit_and_gives_it_back(
    one_rank: World,
) -> None:
    """Also after a raise, and when units had settings of their own before."""
    model = apply_units(TinyGPT(), ["blocks.0"])
    inner = model.get_submodule("blocks.0")
    set_state_dict_type(inner, LOCAL)

    with suppress(KeyError), state_dict_type(model, FULL, ON_FIRST, OPTIM_ON_FIRST):
        inside = get_state_dict_type(model), get_state_dict_type(inner)
        raise KeyError

    assert [settings.state_dict_config for settings in inside] == [ON_FIRST] * 2
    assert inside[0].optim_state_dict_config == OPTIM_ON_FIRST

    assert get_state_dict_type(inner).state_dict_config == LocalStateDictConfig()
    with pytest.raises(CompositionError, match=r"Units differ .* 'blocks\.0' has"):
        get_state_dict_type(model)
    assert set_state_dict_type(model, SHARDED) == FULL_BY_DEFAULT


def test_torchs_types_and_configurations_are_taken_by_name(one_rank: World) -> None:
    """What is set is ours, with the same values."""
    model = fully_shard(tiny_mlp())

    set_state_dict_type(
        model,
        torch_fsdp.StateDictType.FULL_STATE_DICT,  # type: ignore[arg-type]  # torch's
        torch_fsdp.FullStateDictConfig(True, True),  # type: ignore[arg-type]  # torch's
        torch_fsdp.FullOptimStateDictConfig(False, True),  # type: ignore[arg-type]  # torch's
    )

    found = get_state_dict_type(model)
    assert found.state_dict_type is FULL
    assert found.state_dict_config == FullStateDictConfig(True, True)
    assert found.optim_state_dict_config == FullOptimStateDictConfig(False, True)


@pytest.mark.req("U-02", "S1-14")
def test_a_wrong_type_or_configuration_is_refused_and_nothing_is_set(
    one_rank: World,
) -> None:
    """Each message says what was expected and what came."""
    model = fully_shard(tiny_mlp())
    plain = nn.Linear(2, 2)
    bad: Any = "full"
    sharded = ShardedOptimStateDictConfig()

    texts = [
        message_of(lambda: set_state_dict_type(model, bad)),
        message_of(lambda: set_state_dict_type(model, FULL, LocalStateDictConfig())),
        message_of(lambda: set_state_dict_type(model, FULL, None, sharded)),
        message_of(lambda: get_state_dict_type(plain)),
        message_of(state_dict_type(plain, FULL).__enter__),
    ]

    assert "StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED" in texts[0]
    assert (
        "state_dict_config expects a FullStateDictConfig(offload_to_cpu, rank0_only), "
        "got LocalStateDictConfig(" in texts[1]
    )
    assert "expects a FullOptimStateDictConfig" in texts[2]
    assert "get_state_dict_type was called on a Linear that holds no" in texts[3]
    assert "state_dict_type was called on a Linear that holds no" in texts[4]
    with pytest.raises(ValueError, match="sharded values are ShardedValue"):
        set_state_dict_type(model, SHARDED, ShardedStateDictConfig(_use_dtensor=True))
    assert get_state_dict_type(model) == FULL_BY_DEFAULT


@on_ranks(4)
def test_of_several_replicas_the_first_rank_of_the_first_has_everything(
    world: World,
) -> None:
    """Of four ranks in two replicas one saves, and all four load what it has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model, optimizer = trained(world, "wrapper", strategy=strategy, device_mesh=mesh)
    whole = optim_state_dict(model, optimizer)
    fresh = adamw(model.parameters())

    with state_dict_type(model, FULL, ON_FIRST, OPTIM_ON_FIRST):
        saved, state = model.state_dict(), optim_state_dict(model, optimizer)
        fresh.load_state_dict(optim_state_dict_to_load(model, fresh, state))

    again = optim_state_dict(model, fresh)
    for name, values in again["state"].items():
        assert differences(values, whole["state"][name]) == {}
    names = len(TinyGPT().state_dict())
    assert (len(saved), len(state)) == ((0, 0) if world.rank else (names, 2))


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL], ids=lambda kind: kind.name)
@on_ranks(2)
def test_state_of_whole_parameters_may_have_any_shape(
    world: World, kind: StateDictType
) -> None:
    """Adafactor's rows and columns go out and in, whatever the type of state dict."""
    model = fully_shard(tiny_mlp(), strategy=ShardingStrategy.NO_SHARD)
    optimizer: Any = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())

    with state_dict_type(model, kind):
        state = optim_state_dict(model, optimizer)
        optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state))

    after = optimizer.state_dict()["state"]
    for number, values in before["state"].items():
        assert differences(after[number], values) == {}


@on_ranks(1, 3)
def test_local_state_goes_out_and_comes_back_without_communication(
    world: World,
) -> None:
    """`property_tests/test_programs.py` compares the values, pickled ones, too."""
    model, optimizer = trained(world, "wrapper")
    with state_dict_type(model, LOCAL), record() as calls:
        saved, state = model.state_dict(), optim_state_dict(model, optimizer)
        model.load_state_dict(saved)
        optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state))

    assert calls == []
    assert list(saved) == list(TinyGPT().state_dict())
    assert {type(values["exp_avg"]) for values in optimizer.state.values()} == {Tensor}


@on_ranks(2)
def test_local_shards_are_not_given_where_full_parameters_are_shown(
    world: World,
) -> None:
    """The block may have written values that are not in the shards yet."""
    model = gpt("composable")
    with state_dict_type(model, LOCAL), unshard_params(model):
        text = message_of(model.state_dict)
    assert "state_dict was called on (root) inside unshard_params" in text


WAYS: list[Any] = [
    (SHARDED, None, None),
    (
        SHARDED,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ),
    (
        LOCAL,
        LocalStateDictConfig(offload_to_cpu=True),
        LocalOptimStateDictConfig(offload_to_cpu=True),
    ),
]


def parts(state: Any) -> list[Tensor]:
    """Every tensor of this rank in a model's or an optimizer's state dict."""
    values = [v for group in state.get("state", {}).values() for v in group.values()]
    found = [v for v in (values or state.values()) if isinstance(v, Tensor)]
    return [v.local if isinstance(v, ShardedValue) else v for v in found]


@pytest.mark.req("S1-32")
@on_ranks(2)
def test_a_state_dict_keeps_its_values_through_the_next_step(world: World) -> None:
    """Sharded ones are copies, as FSDP1's; so is what goes to the host."""
    model, optimizer = trained(world, "wrapper")
    for number, way in enumerate(WAYS, start=1):
        with state_dict_type(model, *way):
            saved = model.state_dict(), optim_state_dict(model, optimizer)
        before = copy.deepcopy([parts(state) for state in saved])
        step(model, optimizer, world.rank, number)
        with state_dict_type(model, *way):
            now = model.state_dict(), optim_state_dict(model, optimizer)

        for state, kept, later in zip(saved, before, now, strict=True):
            assert kept
            assert all(map(torch.equal, parts(state), kept)), way
            assert not all(map(torch.equal, parts(later), kept)), way


COUNT = 6
WIDTH = 32
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4
SLACK = 512
"""Counters and padding."""


def in_layers(path: str) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)])
    return apply_units(model, [str(i) for i in range(COUNT)], path=path)


def of_model(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return dict(model.state_dict())


def of_optimizer(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return optim_state_dict(model, optimizer)


def touch(values: list[Any]) -> int:
    """Have ``LiveBytes`` know of tensors that were made outside; their bytes."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(tensor.detach().numel() * tensor.itemsize for tensor in tensors)


def measured(
    rank: int, path: str, take: Callable[..., dict[str, Any]]
) -> tuple[int, dict[str, Any]]:
    """Bytes beyond those before at the peak of ``take``, and what it gave."""
    with fake_world(2, rank=rank):
        model = in_layers(path)
        optimizer = optim.AdamW(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
            FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
        )
        with LiveBytes() as live:
            touch(list(model.parameters()))
            for state in optimizer.state.values():
                touch(list(state.values()))
            before = live.now
            live.reset()
            given = take(model, optimizer)
            return live.peak - before, given


TAKE = {"model": (of_model, 1), "optimizer": (of_optimizer, 2)}


@pytest.mark.req("U-04")
@pytest.mark.parametrize("what", TAKE)
@both_paths
def test_a_state_is_put_together_unit_by_unit(path: str, what: str) -> None:
    """The first rank holds the result and one unit: all units at once in device memory
    would be twice as much. Others, which have nothing to return, hold a shard more."""
    take, copies = TAKE[what]

    first, given = measured(0, path, take)
    other, nothing = measured(1, path, take)

    assert first >= copies * COUNT * UNIT_BYTES
    assert first <= (copies * COUNT + 2) * UNIT_BYTES + SLACK * COUNT
    assert len(given) > 0
    assert other <= UNIT_BYTES + SLACK * COUNT
    assert nothing == {}


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
