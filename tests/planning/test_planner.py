"""From a tree to units: which parameters go where, while the tree stays as it is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.compose.registry import set_state
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tools.plan import plan
from composable_fsdp.tools.sharding_plan import plan_modules
from tests.planning.trees import linears, names_of, snapshot, units


def test_a_meta_model_is_planned_without_a_process_group_and_stays_as_it_was() -> None:
    """Planning needs neither values nor ranks, and leaves no trace on the tree."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = snapshot(model)

    result = plan(model, world_size=512, policy=units({"1": {}}))

    assert not dist.is_initialized()
    assert names_of(result) == {"": ["0.bias", "0.weight"], "1": ["bias", "weight"]}
    assert snapshot(model) == before


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
