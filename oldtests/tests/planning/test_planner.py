"""From a tree to units: which parameters go where, while the tree stays as it is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.compose.registry import set_state
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.policies import ModuleWrapPolicy
from composable_fsdp.tools.plan import plan
from composable_fsdp.tools.sharding_plan import plan_modules
from tests.planning.trees import linears, names_of, snapshot, units
from tests.support.models import TinyBlock, TinyGPT


def test_a_meta_model_is_planned_without_a_process_group_and_stays_as_it_was() -> None:
    """Planning needs neither values nor ranks, and leaves no trace on the tree."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = snapshot(model)

    result = plan(model, world_size=512, policy=units({"1": {}}))

    assert not dist.is_initialized()
    assert names_of(result) == {"": ["0.bias", "0.weight"], "1": ["bias", "weight"]}
    assert snapshot(model) == before


def test_each_parameter_goes_to_the_nearest_unit_above_it() -> None:
    """Blocks take what is below them, the root what is left, in order of .modules()."""
    model = TinyGPT(layers=2)

    result = plan(model, world_size=2, policy=ModuleWrapPolicy({TinyBlock}))

    inner = sorted(name for name, _ in model.blocks[0].named_parameters())
    assert list(names_of(result)) == ["", "blocks.0", "blocks.1"]
    assert names_of(result)["blocks.0"] == names_of(result)["blocks.1"] == inner
    assert names_of(result)[""] == [
        "head.weight",
        "norm.bias",
        "norm.weight",
        "positions.weight",
        "tokens.weight",
    ]
    assert [unit.class_name for unit in result.units] == ["TinyGPT"] + ["TinyBlock"] * 2


@pytest.mark.req("B-03")
def test_earlier_units_and_replicated_subtrees_are_left_out() -> None:
    """A state of an earlier call or a mark ends the walk, and the state is noted."""
    model, earlier = linears(3), object()
    set_state(model[0], "fully_shard", earlier)
    set_state(model[1], "replicate", object())

    result, targets = plan_modules(
        [model], PlanRequest(options=UnitOptions(), world_size=2)
    )

    assert names_of(result) == {"": ["2.weight"]}
    assert targets[0].units_below == (earlier,)


@pytest.mark.req("B-03")
def test_a_module_at_two_places_is_counted_once() -> None:
    """Shared modules are held once and keep the name of the first place."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared))

    result, targets = plan_modules(
        [model], PlanRequest(options=UnitOptions(), world_size=2)
    )

    assert names_of(result) == {"": ["0.bias", "0.weight"]}
    assert result.numel == 20
    slots = [slot for region in result.units[0].regions for slot in region.parameters]
    assert {slot.fqns for slot in slots} == {
        ("0.weight", "1.0.weight"),
        ("0.bias", "1.0.bias"),
    }
    assert len(targets[0].places) == 2
