"""The stages of one application, each by itself, and names that are gone."""

from __future__ import annotations

import pytest
from torch import nn

import composable_fsdp
from composable_fsdp.comm.nodes import groups_for
from composable_fsdp.compose.registry import API
from composable_fsdp.config import ShardingStrategy
from composable_fsdp.entries.apply import prepare
from composable_fsdp.flat.build import build_handle
from composable_fsdp.planning.assign import PlanRequest, assign_units
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.runtime.build import build_units
from composable_fsdp.tools.sharding_plan import plan_modules
from composable_fsdp.tree.state import _FSDPState
from tests.support.world import World


@pytest.mark.req("S1-39")
def test_the_stages_of_an_application_can_run_alone(one_rank: World) -> None:
    """Options without a module, units without ranks, buffers without a state; hooks
    come last."""
    model, request = nn.Linear(2, 2), PlanRequest(UnitOptions(), world_size=1)
    before = [id(p) for p in model.parameters()]

    application = prepare(UnitOptions(strategy=ShardingStrategy.NO_SHARD))
    with pytest.raises(AttributeError):
        application.device_id = None  # type: ignore[misc]
    (unit,) = assign_units([model], PlanRequest(UnitOptions(), world_size=4))
    assert [id(p) for p, _ in unit.parameters] == before
    _, (target,) = plan_modules([model], request)
    groups = groups_for(application.ranks, ShardingStrategy.FULL_SHARD)
    handle = build_handle(target, groups=groups, device=one_rank.device)
    assert handle.leaves == (model.weight, model.bias)
    assert not model._forward_pre_hooks

    other, state = nn.Linear(2, 2), _FSDPState()
    _, targets = plan_modules([other], request)
    states = build_units(
        targets,
        state,
        ranks=application.ranks,
        device=one_rank.device,
        before=None,
        awaiting=(),
        synced=False,
        api=API,
    )
    assert states == [state]
    assert len(other._forward_pre_hooks) == 1


@pytest.mark.req("S1-29")
def test_the_public_surface_uses_one_term_for_names() -> None:
    """No HandleConfig, no module-to-handles map, no word for a name but ``fqn``."""
    gone = {"HandleConfig", "_module_to_handles", "_module_to_handle", "prefixed_name"}

    assert not gone & {*_FSDPState.__slots__, *vars(composable_fsdp)}
    assert "fqn" in _FSDPState.__slots__
