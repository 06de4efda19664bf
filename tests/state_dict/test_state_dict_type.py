"""Types of state dict: what each holds, what takes it, and in how much memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn, optim
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
from composable_fsdp.state_dict import get_state_dict_type
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.optim.test_dcp_optim import trained
from tests.support.memory import LiveBytes
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import adamw, apply_units, differences
from tests.support.sharded import both_paths, gpt, message_of, step
from tests.support.world import World, fake_world

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
    hybrid = {"strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    model, optimizer = trained(world, "wrapper", **hybrid)
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


UNITS = 6
WIDTH = 32
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4
SLACK = 512
"""Counters and padding."""


def build(path: str) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
    return apply_units(model, [str(i) for i in range(UNITS)], path=path)


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
        model = build(path)
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

    assert first >= copies * UNITS * UNIT_BYTES
    assert first <= (copies * UNITS + 2) * UNIT_BYTES + SLACK * UNITS
    assert len(given) > 0
    assert other <= UNIT_BYTES + SLACK * UNITS
    assert nothing == {}
