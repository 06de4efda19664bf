"""Optimizer state: refusals on every rank, and FSDP1's older functions."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from composable_fsdp import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    optim_state_dict,
    optim_state_dict_to_load,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim import rekey_optim_state_dict
from composable_fsdp.optim.save import local_state_dict
from tests.optim.models import mixed, train_sharded, two_groups
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    apply_units,
)
from tests.support.sharded import message_of
from tests.support.world import World

FSDP = FullyShardedDataParallel


@on_ranks(3)
def test_a_state_that_does_not_fit_is_refused_by_name(world: World) -> None:
    """Each has what was found, what was expected and the way out; nothing is loaded."""
    model = mixed("wrapper")
    optimizer = torch.optim.AdamW(two_groups(model))
    train_sharded(model, optimizer, world, range(1))
    good = optim_state_dict(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    names, shape, groups = (copy.deepcopy(good) for _ in range(3))
    del names["state"]["second.bias"]
    names["param_groups"][0]["params"].remove("second.bias")
    names["state"]["other.weight"] = {}
    shape["state"]["second.bias"]["exp_avg"] = torch.ones(4)
    groups["param_groups"][1]["params"].append("second.bias")
    groups["param_groups"][0]["params"].remove("second.bias")
    wrong: list[tuple[dict[str, Any], str]] = [
        (names, "missing ['second.bias'], left over ['other.weight']. Load it into"),
        (
            shape,
            "state 'exp_avg' of 'second.bias' has shape (4,); expected a scalar or the "
            "parameter's full shape (3,). Pass what optim_state_dict(model, optim)",
        ),
        (groups, "group 0 holds parameters of several saved groups ([0, 1])"),
        (
            {**good, "state": {"second.bias": {}, 0: {}, 1: {}}},
            "by names or by numbers; got both: ['second.b",
        ),
        (
            {"state": {}, "param_groups": [{"params": [0, 1]}]},
            "groups of [2]; the optimizer's groups have [",
        ),
        ({}, "expects a dict with the keys 'state' and 'param_groups'"),
        (
            {**good, "state": {**good["state"], "_fsdp_wrapped_module.scale": {}}},
            "got two keys for parameter 'scale': 'scale' and "
            "'_fsdp_wrapped_module.scale'. Leave one of them out.",
        ),
    ]
    for state, words in wrong:
        load = partial(optim_state_dict_to_load, model, optimizer, state)
        text = message_of(partial(load, load_directly=True))
        assert text.startswith("CheckpointError: ")
        assert words in text
    assert _same(optimizer.state_dict(), before)
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=1)
    text = message_of(lambda: optim_state_dict(model, foreign))
    assert "of the optimizer's group 0, of shape (3,), is not a par" in text
    assert "Pass the model that the optimizer trains." in text


@on_ranks(2)
def test_what_one_rank_refuses_is_refused_on_all(world: World) -> None:
    """Nobody waits for a rank that has raised before anything was exchanged."""
    model = apply_units(tiny_mlp(), ["0"])
    other = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    optimizer = torch.optim.Adam(model.parameters())
    wrong = {"nothing": 1} if world.rank else None
    for act, words in (
        (
            partial(optim_state_dict, model, other if world.rank else optimizer),
            "Parameter 0 of the optimizer's group 0, of shape (2,), is not",
        ),
        (
            partial(optim_state_dict, model, optimizer, wrong),
            "expects a dict with the keys 'state' and 'param_groups', got",
        ),
    ):
        text = message_of(act)
        assert words in text
        assert world.rank or text.startswith("CheckpointError: On rank 1: ")


@pytest.mark.parametrize("group", [True, False])
@on_ranks(2)
def test_a_state_that_cannot_be_sent_is_refused_on_all(
    world: World, group: bool
) -> None:
    """On the rank that has it and on those that wait."""
    model = apply_units(tiny_mlp(), ["0"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    whole = optim_state_dict(model, optimizer)
    scatter = partial(
        FSDP.scatter_full_optim_state_dict,
        model=model,
        optim=optimizer,
        group=world.group if group else None,
    )
    broken = copy.deepcopy(whole)
    broken["state"]["0.weight"]["exp_avg"] = lambda: 1

    assert message_of(lambda: scatter(broken)).startswith(
        "CheckpointError: The optimizer state of the first rank cannot be sent to the "
        "others: "
    )
    given = scatter(whole if world.rank == 0 else None)
    assert _same(given, local_state_dict(optimizer))


NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def stepped_plain(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(two_groups(model))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return optimizer


def torchs(key_type: OptimStateKeyType) -> Any:
    return torch_fsdp.OptimStateKeyType[key_type.name]


def test_names_become_numbers_and_numbers_names_as_with_torch() -> None:
    """On a plain model; what has such keys already keeps them."""
    model = tiny_mlp()
    optimizer = stepped_plain(model)
    numbered = optimizer.state_dict()
    before = copy.deepcopy(numbered)

    named = rekey_optim_state_dict(numbered, NAME, model, optim=optimizer)

    theirs = torch_fsdp.FullyShardedDataParallel.rekey_optim_state_dict(
        numbered, torchs(NAME), model, optim=optimizer
    )
    assert _same(named, theirs)
    assert named["param_groups"][1]["params"] == ["0.weight", "2.weight"]
    assert _same(numbered, before)
    assert _same(rekey_optim_state_dict(named, NAME, model, optim=optimizer), named)
    back = rekey_optim_state_dict(named, torchs(ID), model, two_groups(model))
    assert _same(back, numbered)


@pytest.mark.req("U-02")
def test_keys_that_nobody_knows_are_refused() -> None:
    """The message has some of both, and what to pass."""
    model = tiny_mlp()
    optimizer = stepped_plain(model)
    state = optimizer.state_dict()
    other = {"state": {"norm.weight": {}}, "param_groups": state["param_groups"]}
    wrong: Any = "names"

    with pytest.raises(CheckpointError, match=r"got both: \['norm.weight'\] and \[0"):
        rekey_optim_state_dict(other, NAME, model, optim=optimizer)
    with pytest.raises(TypeError, match=r"one of OptimStateKeyType\.PARAM_NAME"):
        rekey_optim_state_dict(state, wrong, model, optim=optimizer)
