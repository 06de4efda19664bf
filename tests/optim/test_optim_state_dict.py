"""Refusals on every rank, FSDP1's older functions, and several optimizers."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from composable_fsdp import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    async_save,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    state_dict_type,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.features import flat_parameters
from composable_fsdp.optim import rekey_optim_state_dict
from composable_fsdp.optim.save import local_state_dict
from tests.optim.models import mixed, train_sharded, two_groups
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    apply_units,
)
from tests.support.sharded import RankCount, gpt, message_of, step
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


Optims = list[torch.optim.Optimizer]


class All:
    """Several optimizers that step together."""

    def __init__(self, optims: Optims) -> None:
        self.optims = optims

    def step(self) -> None:
        for each in self.optims:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optims:
            each.zero_grad()


def parts(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest, with options of their own."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.02},
    ]


def one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parts(model))


def several(model: nn.Module) -> Optims:
    return [torch.optim.AdamW([group]) for group in parts(model)]


def train(model: nn.Module, optims: Optims, rank: int, at: int) -> None:
    step(model, All(optims), rank, at)  # type: ignore[arg-type]  # all that it needs


@on_ranks(3)
def test_the_state_of_each_is_its_part_of_one_with_their_groups(world: World) -> None:
    """In every type of state dict, out and in, by names."""
    model, twin = gpt("wrapper"), gpt("wrapper")
    optims, optim = several(model), one(twin)
    for at in range(2):
        train(model, optims, world.rank, at)
        train(twin, [optim], world.rank, at)
    for kind in StateDictType:
        with state_dict_type(model, kind), state_dict_type(twin, kind):
            theirs = optim_state_dict(twin, optim)
            ours = [optim_state_dict(model, each) for each in optims]
            state = {k: v for each in ours for k, v in each["state"].items()}
            assert _same({k: state[k] for k in theirs["state"]}, theirs["state"])
            assert [g for e in ours for g in e["param_groups"]] == theirs[
                "param_groups"
            ]
            for each, fresh in zip(ours, several(model), strict=True):
                optim_state_dict_to_load(model, fresh, each, load_directly=True)
                assert _same(optim_state_dict(model, fresh), each)


def save_several(world: World, folder: Path) -> tuple[Any, Any]:
    model = gpt("composable")
    optims = several(model)
    train(model, optims, 0, 0)
    save(folder / "several", model, optims)
    async_save(folder / "async", model, optims).result()
    full = [optim_state_dict(model, each) for each in optims]
    return full, {k: v.clone() for k, v in model.state_dict().items()}


def joined(states: Any) -> Any:
    """The states by name, and the groups by the name of the first parameter."""
    return (
        {k: each["state"][k] for each in states for k in sorted(each["state"])},
        {g["params"][0]: g for each in states for g in each["param_groups"]},
    )


def load_either(world: World, folder: Path, full: Any, weights: Any) -> None:
    for name, make in (
        ("several", several),
        ("several", lambda model: [one(model)]),
        ("async", lambda m: several(m)[::-1]),
    ):
        model = gpt("wrapper", seed=7)
        optims = make(model)
        load(folder / name, model, optims)
        assert _same(dict(model.state_dict()), weights)
        found = [optim_state_dict(model, each) for each in optims]
        assert _same(joined(found), joined(full))
        train(model, optims, 0, 1)


def test_a_checkpoint_of_several_goes_to_another_number_of_ranks(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Into several, into one with their groups, and in another order."""
    full, weights = ranks(2).run(save_several, tmp_path)[0]

    ranks(3).run(load_either, tmp_path, full, weights)


@on_ranks(2)
def test_kinds_and_flat_parameters_may_be_mixed(world: World, tmp_path: Path) -> None:
    """Each parameter's state and options come back to the optimizer that has it."""

    def make(model: nn.Module) -> Optims:
        return [
            torch.optim.SGD(flat_parameters(model.blocks), momentum=0.9, lr=0.1),  # type: ignore[arg-type]  # a list of units
            torch.optim.AdamW(
                [p for n, p in model.named_parameters() if "blocks" not in n]
            ),
        ]

    model, again = gpt("composable"), gpt("composable", seed=5)
    optims, others = make(model), make(again)
    train(model, optims, world.rank, 0)
    save(tmp_path / "run", model, optims)
    load(tmp_path / "run", again, others)
    for each, other in zip(optims, others, strict=True):
        assert _same(optim_state_dict(again, other), optim_state_dict(model, each))
    swapped = [others[1], others[0]]
    assert (
        message_of(lambda: load(tmp_path / "run", again, swapped))
        == "nothing was raised"
    )
    text = message_of(lambda: load(tmp_path / "run", again, others[0]))
    assert "is not in it" in text
    wrong = torch.optim.SGD(list(again.parameters()))
    assert "CheckpointError" in message_of(lambda: load(tmp_path / "run", again, wrong))


def test_a_parameter_in_two_optimizers_is_refused(tmp_path: Path) -> None:
    """Its state under its name would be that of one."""
    model = tiny_mlp()
    optims: Optims = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    wrong: Any = optims

    text = message_of(lambda: save(tmp_path / "run", model, optims))
    assert text.startswith(
        "CheckpointError: Parameter 0 of group 0 of optimizer 1, of shape "
    )
    assert "is in optimizer 0 as well" in text
    text = message_of(lambda: optim_state_dict(model, wrong))
    assert "and a list. Of several optimizers, ask for the state of each" in text
