"""The stages of one application, each by itself, and names that are gone."""

from __future__ import annotations

import pytest
from torch import nn

import composable_fsdp
from composable_fsdp.config import ShardingStrategy
from composable_fsdp.entries.apply import prepare
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.build import build_handle
from composable_fsdp.planning.assign import PlanRequest, assign_units
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.places import API
from composable_fsdp.planning.plan import plan_modules
from composable_fsdp.runtime.build import build_units
from composable_fsdp.tree.state import _FSDPState
from tests.support.world import World


@pytest.mark.req("S1-39")
def test_options_and_groups_are_resolved_without_a_module(one_rank: World) -> None:
    """The first stage reads arguments only and gives a frozen value."""
    application = prepare(UnitOptions(strategy=ShardingStrategy.NO_SHARD))

    assert application.ranks.world_size == 1
    with pytest.raises(AttributeError):
        application.device_id = None  # type: ignore[misc]


@pytest.mark.req("S1-39")
def test_assignment_needs_neither_ranks_nor_a_plan() -> None:
    """The second stage gives every parameter its unit, and changes nothing."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [id(p) for p in model.parameters()]

    (unit,) = assign_units([model], PlanRequest(UnitOptions(), world_size=4))

    assert [id(p) for p, _ in unit.parameters] == before


@pytest.mark.req("S1-39")
def test_buffers_are_built_from_a_target_without_a_state(one_rank: World) -> None:
    """The third stage turns a planned unit into buffers, before any hook exists."""
    model = nn.Linear(2, 2)
    application = prepare(UnitOptions())
    _, (target,) = plan_modules([model], PlanRequest(UnitOptions(), world_size=1))
    groups = application.ranks.for_strategy(ShardingStrategy.FULL_SHARD)

    handle = build_handle(target, groups=groups, device=one_rank.device)

    assert handle.leaves == (model.weight, model.bias)
    assert not model._forward_pre_hooks


@pytest.mark.req("S1-39")
def test_states_and_hooks_come_last(one_rank: World) -> None:
    """The last stage fills the state that the registry made, and arms the module."""
    model = nn.Linear(2, 2)
    application = prepare(UnitOptions())
    _, targets = plan_modules([model], PlanRequest(UnitOptions(), world_size=1))
    state = _FSDPState()

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
    assert len(model._forward_pre_hooks) == 1


def test_a_tree_wide_option_is_refused_before_groups_are_asked() -> None:
    """Bad options never reach the process group."""
    with pytest.raises(TypeError, match="strategy expects one of"):
        UnitOptions(strategy="FULL_SHARD")  # type: ignore[arg-type]


@pytest.mark.req("S1-29")
def test_the_public_surface_uses_one_term_for_names() -> None:
    """No HandleConfig, no module-to-handles map, no word for a name but ``fqn``."""
    gone = {"HandleConfig", "_module_to_handles", "_module_to_handle", "prefixed_name"}
    slots = {*_FSDPState.__slots__, *vars(composable_fsdp)}

    assert not gone & slots
    assert "fqn" in _FSDPState.__slots__
    assert issubclass(PlanError, composable_fsdp.FSDPError)
