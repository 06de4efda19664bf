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
