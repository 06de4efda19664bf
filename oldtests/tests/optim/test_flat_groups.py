"""Groups of options over flat parameters: regions that hold one group each."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_fsdp import fully_shard, load, optim_state_dict, plan, save
from composable_fsdp.comm.collectives import record
from composable_fsdp.features import flat_parameter_groups
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    apply_units,
    backward,
    differences,
    gpt_input,
    loss_of,
    tolerance_at,
)
from tests.support.sharded import UNITS, RankCount, message_of
from tests.support.world import World


def kind(name: str, parameter: nn.Parameter) -> Hashable:
    """Embeddings, other matrices, and what does not decay."""
    if "tokens" in name or "positions" in name:
        return "embedding"
    return "matrix" if parameter.ndim >= 2 else "rest"


# With an eps that keeps rounding from deciding the sign of a step.
OPTIONS: dict[Hashable, dict[str, Any]] = {
    "embedding": {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-3},
    "matrix": {"lr": 0.03, "weight_decay": 0.5, "eps": 1e-3},
    "rest": {"lr": 0.05, "weight_decay": 0.0, "eps": 1e-3},
}


def grouped(seed: int = 0) -> nn.Module:
    return apply_units(TinyGPT(seed=seed), UNITS, group_by=kind)


def over_flats(model: nn.Module) -> torch.optim.Optimizer:
    groups = flat_parameter_groups(model)
    return torch.optim.AdamW([{"params": groups[k], **OPTIONS[k]} for k in OPTIONS])


def over_originals(model: nn.Module) -> torch.optim.Optimizer:
    params: dict[Hashable, list[nn.Parameter]] = {k: [] for k in OPTIONS}
    for name, parameter in model.named_parameters():
        params[kind(name, parameter)].append(parameter)
    return torch.optim.AdamW([{"params": params[k], **OPTIONS[k]} for k in OPTIONS])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for at in range(3):
        backward(loss_of(model, gpt_input(at, rank)))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
def test_training_with_groups_is_that_over_originals_in_such_groups(
    world: World,
) -> None:
    """Learning rates and weight decay of their own."""
    model, twin = grouped(), apply_units(TinyGPT(), UNITS)
    train(model, over_flats(model), world.rank)
    train(twin, over_originals(twin), world.rank)

    found = differences(model.state_dict(), twin.state_dict())
    tolerance = tolerance_at(world.world_size)
    assert all(value <= tolerance for value in found.values())
    assert tolerance or found == {}


@on_ranks(2)
def test_each_region_holds_one_group_and_is_sent_with_the_others(world: World) -> None:
    """No collective more: regions of a unit are coalesced."""
    model = grouped()
    for handle in _get_fsdp_handles(model):
        for region in handle.layout.regions:
            shapes = [
                (slot.fqn, nn.Parameter(torch.empty(slot.shape)))
                for slot in region.layout.parameters
            ]
            assert {kind(*each) for each in shapes} == {region.layout.group}
    groups = flat_parameter_groups(model)
    assert {k: len(flats) for k, flats in groups.items()} == {
        "embedding": 1,
        "matrix": 3,
        "rest": 3,
    }
    sent = []
    for each in (model, apply_units(TinyGPT(), UNITS)):
        backward(loss_of(each, gpt_input(0, world.rank)))
        with record() as calls:
            backward(loss_of(each, gpt_input(1, world.rank)))
        sent.append(len(calls))
    assert sent[0] == sent[1]


def save_grouped(world: World, folder: Path) -> Any:
    model = grouped()
    optimizer = over_flats(model)
    train(model, optimizer, 0)
    save(folder / "run", model, optimizer)
    return optim_state_dict(model, optimizer)


def load_grouped(world: World, folder: Path, state: Any) -> None:
    for make, over in (
        (grouped, over_flats),
        (lambda seed: apply_units(TinyGPT(seed=seed), UNITS), over_originals),
    ):
        model = make(3)
        optimizer = over(model)
        load(folder / "run", model, optimizer)
        found = optim_state_dict(model, optimizer)
        assert _same(found["state"], state["state"])
        lrs = [group["lr"] for group in found["param_groups"]]
        assert lrs == [group["lr"] for group in state["param_groups"]]


def test_a_checkpoint_with_groups_goes_to_other_ranks_and_to_originals(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Each group's options and state come back to it."""
    state = ranks(2).run(save_grouped, tmp_path)[0]

    ranks(3).run(load_grouped, tmp_path, state)


def test_the_plan_names_groups_and_padding_stays_small() -> None:
    """A group of its own for what does not decay costs next to no padding."""
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(1024, 16, 4096)
    for world_size in (8, 64, 1024):
        (unit,) = plan(block, world_size=world_size, group_by=kind).units
        assert [region.group for region in unit.regions] == ["matrix", "rest"]
        padded = sum(region.padded_numel for region in unit.regions)
        whole = sum(region.numel for region in unit.regions)
        assert padded <= 1.01 * whole
    assert "group 'rest'" in str(plan(block, world_size=8, group_by=kind))


def test_what_is_no_function_or_gives_no_key_is_refused() -> None:
    """With the parameter's name."""
    wrong: Any = "matrix"
    text = message_of(lambda: fully_shard(nn.Linear(2, 2), group_by=wrong))
    assert text.startswith("TypeError: group_by expects a function of a parameter")
    keys: dict[str, Any] = {
        "list": lambda name, _: [name],
        "Tensor": lambda _, parameter: parameter.sum() > 0,
    }
    for kind, bad in keys.items():
        ask = partial(plan, nn.Linear(2, 2), world_size=2, group_by=bad)
        assert f"for parameter 'weight' it returned a {kind}" in message_of(ask)
