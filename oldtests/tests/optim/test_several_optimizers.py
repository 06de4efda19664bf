"""Several optimizers over parts of one model: one state, as if they were one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_fsdp import (
    StateDictType,
    async_save,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    state_dict_type,
)
from composable_fsdp.features import flat_parameters
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.sharded import RankCount, gpt, message_of, step
from tests.support.world import World

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
def test_the_state_of_several_is_that_of_one_with_their_groups(world: World) -> None:
    """In every type of state dict, out and in, by names."""
    model, twin = gpt("wrapper"), gpt("wrapper")
    optims, optim = several(model), one(twin)
    for at in range(2):
        train(model, optims, world.rank, at)
        train(twin, [optim], world.rank, at)
    for kind in StateDictType:
        with state_dict_type(model, kind), state_dict_type(twin, kind):
            theirs = optim_state_dict(twin, optim)
            ours = optim_state_dict(model, optims)
            given = [each.state_dict() for each in optims]
            assert _same(ours, theirs)
            assert _same(optim_state_dict(model, optims, given), theirs)

            fresh, other = several(model), one(twin)
            loaded = optim_state_dict_to_load(model, fresh, theirs, load_directly=True)
            optim_state_dict_to_load(twin, other, ours, load_directly=True)
            assert len(loaded) == 2
            assert _same(optim_state_dict(model, fresh), theirs)
            assert _same(optim_state_dict(twin, other), theirs)
            named = optim_state_dict_to_load(model, fresh, theirs, True)
            held = {name for name, p in model.named_parameters() if p.numel()}
            names = theirs["param_groups"][1]["params"]
            assert list(named[1]["state"]) == [name for name in names if name in held]


def save_several(world: World, folder: Path) -> tuple[Any, Any]:
    model = gpt("composable")
    optims = several(model)
    train(model, optims, 0, 0)
    save(folder / "several", model, optims)
    async_save(folder / "async", model, optims).result()
    full = optim_state_dict(model, optims)
    return full, {k: v.clone() for k, v in model.state_dict().items()}


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
        state = optim_state_dict(model, optims)
        assert _same(state["state"], full["state"])
        by_first = {g["params"][0]: g for g in full["param_groups"]}
        assert all(_same(g, by_first[g["params"][0]]) for g in state["param_groups"])
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
    state = optim_state_dict(model, optims)
    assert _same(optim_state_dict(again, others), state)
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"} == {
        key for values in state["state"].values() for key in values
    }
    swapped = [others[1], others[0]]
    assert (
        message_of(lambda: load(tmp_path / "run", again, swapped))
        == "nothing was raised"
    )
    text = message_of(lambda: load(tmp_path / "run", again, others[0]))
    assert "is not in it" in text
    wrong = torch.optim.SGD(list(again.parameters()))
    assert "CheckpointError" in message_of(lambda: load(tmp_path / "run", again, wrong))


def test_a_parameter_in_two_optimizers_and_too_few_states_are_refused(
    tmp_path: Path,
) -> None:
    """Its state under its name would be that of one; a state for each, or none."""
    model = tiny_mlp()
    optims: Optims = [torch.optim.AdamW(model.parameters()) for _ in range(2)]

    for call in (
        lambda: save(tmp_path / "run", model, optims),
        lambda: optim_state_dict(model, optims),
    ):
        text = message_of(call)
        assert text.startswith(
            "CheckpointError: Parameter 0 of group 0 of optimizer 1, of shape "
        )
        assert "is in optimizer 0 as well" in text
    optims = several(model)
    text = message_of(lambda: optim_state_dict(model, optims, optims[0].state_dict()))
    assert text.startswith("TypeError: optim_state_dict expects a state for each of 2")
