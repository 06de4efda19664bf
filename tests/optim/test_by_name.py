"""Optimizer state by name, whatever order, parameters and class an optimizer has."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    state_dict_type,
)
from composable_fsdp.optim.own_state_dict import local_state_dict
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import apply_units, averaged_gradients, wide_input
from tests.support.sharded import both_paths, message_of
from tests.support.world import World

with warnings.catch_warnings():
    # It compiles by torch.jit what it exports.
    warnings.simplefilter("ignore")
    from torch.distributed.optim.named_optimizer import _NamedOptimizer

State = dict[str, Any]
x_of = wide_input(8)


def groups_of(model: nn.Module, rank: int) -> list[State]:
    """Weights and biases, in another order of groups and parameters on each rank."""
    named = list(model.named_parameters())
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    groups: list[State] = [
        {"params": weights, "lr": 0.1},
        {"params": biases, "lr": 0.2},
    ]
    if rank % 2:
        groups = [{**g, "params": g["params"][::-1]} for g in groups[::-1]]
    return groups


def stepped(
    world: World, path: str, *, steps: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """A sharded model, and the plain one; their optimizers after equal steps."""
    plain = tiny_mlp()
    model = apply_units(tiny_mlp(), ["0", "2"], path=path)
    ours = torch.optim.AdamW(groups_of(model, world.rank))
    theirs = torch.optim.AdamW(groups_of(plain, 0))
    for at in range(steps):
        inputs = [x_of(at, rank) for rank in range(world.world_size)]
        for each in (ours, theirs):
            each.zero_grad()
        averaged_gradients(plain, inputs)
        model(inputs[world.rank]).pow(2).mean().backward()
        ours.step()
        theirs.step()
    return model, ours, plain, theirs


@pytest.mark.req("P-20")
@on_ranks(3)
def test_each_rank_may_have_its_own_order(world: World, tmp_path: Path) -> None:
    """Of groups and of parameters; out and in again, in every form."""
    model, optimizer, _, _ = stepped(world, "wrapper")
    own = copy.deepcopy(local_state_dict(optimizer))
    whole = optim_state_dict(model, optimizer)
    # The same on all ranks, and options go with the parameters.
    by_name = {n: g["lr"] for g in whole["param_groups"] for n in g["params"]}
    assert by_name == {n: 0.1 if "weight" in n else 0.2 for n in by_name}
    seen = world.gather(
        {n: s["exp_avg"].sum().item() for n, s in whole["state"].items()}
    )
    assert all(each == seen[0] for each in seen)
    first = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
    kinds: dict[str, tuple[Any, ...]] = {
        "full": (StateDictType.FULL_STATE_DICT,),
        "first": (StateDictType.FULL_STATE_DICT, *first),
        "sharded": (StateDictType.SHARDED_STATE_DICT,),
        "local": (StateDictType.LOCAL_STATE_DICT,),
    }
    for kind in (*kinds, "native"):
        _, fresh, _, _ = new = stepped(world, "wrapper", steps=1)
        if kind == "native":
            save(tmp_path / "saved", model, optimizer)
            load(tmp_path / "saved", new[0], fresh)
        else:
            asked: Any = kinds[kind]
            with state_dict_type(model, *asked), state_dict_type(new[0], *asked):
                state = optim_state_dict(model, optimizer)
                fresh.load_state_dict(optim_state_dict_to_load(new[0], fresh, state))
        assert _same(local_state_dict(fresh)["state"], own["state"]), kind
        assert [g["lr"] for g in fresh.param_groups] == [
            g["lr"] for g in own["param_groups"]
        ]


def step_with(
    optimizer: Any, model: nn.Module, extra: nn.Parameter | None, world: World
) -> None:
    model(x_of(0, world.rank)).pow(2).mean().backward()
    if extra is not None:
        extra.grad = torch.ones_like(extra)
    optimizer.step()


@pytest.mark.req("P-20")
@both_paths
@on_ranks(2)
def test_what_the_model_does_not_hold_goes_by_the_name_it_was_given(
    world: World, path: str
) -> None:
    """Every rank holds it whole; without a name of its own it is refused."""
    model, extra, pairs = with_extra(path)
    optimizer = torch.optim.AdamW(pairs, lr=0.1)
    step_with(optimizer, model, extra, world)
    before = copy.deepcopy(local_state_dict(optimizer))

    state = optim_state_dict(model, optimizer)
    step_with(optimizer, model, extra, world)
    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state))

    assert torch.equal(state["state"]["my.extra"]["exp_avg"], torch.full((3,), 0.1))
    assert state["param_groups"][0]["params"][-1] == "my.extra"
    assert _same(local_state_dict(optimizer)["state"], before["state"])
    wrong: list[Any] = [[*model.parameters(), extra], [("0.weight", extra)]]
    for parameters in wrong:
        unnamed = torch.optim.AdamW(parameters)
        text = message_of(partial(optim_state_dict, model, unnamed))
        assert "make the optimizer of (name, parameter) pairs, with names" in text


def with_extra(path: str) -> tuple[nn.Module, nn.Parameter, Any]:
    """A model, a parameter of no model, and both by name."""
    model, extra = apply_units(tiny_mlp(), ["0"], path=path), torch.ones(3)
    parameter = nn.Parameter(extra)
    return model, parameter, [*model.named_parameters(), ("my.extra", parameter)]


@pytest.mark.req("P-20")
@on_ranks(2)
def test_an_optimizer_around_one_is_taken_by_its_names(world: World) -> None:
    """torch's ``_NamedOptimizer``, which does not call ``Optimizer.__init__``."""
    model, extra, pairs = with_extra("wrapper")
    make: Any = _NamedOptimizer
    optimizer = make(pairs, torch.optim.AdamW, None, None, lr=0.1)
    step_with(optimizer, model, extra, world)
    own = {p: copy.deepcopy(v) for p, v in optimizer._optimizer.state.items()}

    state = optim_state_dict(model, optimizer)
    step_with(optimizer, model, extra, world)
    given = optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
    optimizer.load_state_dict(given)

    names = [name for name, _ in pairs]
    held = [name for name, parameter in pairs if parameter.numel()]
    assert sorted(state["state"]) == sorted(names)
    assert sorted(given["state"]) == sorted(held)
    for name, parameter in model.named_parameters():
        whole = state["state"][name]["exp_avg"]
        assert whole.shape == dict(tiny_mlp().named_parameters())[name].shape
        assert _same(optimizer._optimizer.state.get(parameter), own.get(parameter))
    assert _same(optimizer._optimizer.state[extra], own[extra])


@pytest.mark.req("P-20")
@on_ranks(2)
def test_a_block_around_a_module_without_units_does_nothing(world: World) -> None:
    """As FSDP1's; beside units it shows theirs."""
    alone = nn.Linear(2, 2)
    with FullyShardedDataParallel.summon_full_params(alone):
        assert alone.weight.shape == (2, 2)
    model = fully_shard(tiny_mlp())
    with FullyShardedDataParallel.summon_full_params(nn.ModuleList([alone, model])):
        assert model.get_parameter("0.weight").shape == (12, 8)
