"""The plan of units that are sharded, as they are now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from composable_fsdp.comm.placements import RESHARDING
from composable_fsdp.features.comm_hooks.int8_exchange import int8_all_to_all_hook
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tree.state import _FSDPState


def plan_of_units(units: Iterable[tuple[str, _FSDPState]]) -> ShardingPlan:
    """Return the plan of sharded units, one at least, outermost first."""
    plans = tuple([unit_plan(fqn, state) for fqn, state in units])
    # All units of a model are over the same ranks, in shards or replicas.
    return ShardingPlan(plans, plans[0].shard_world_size * plans[0].replicas)


def unit_plan(fqn: str, state: _FSDPState) -> UnitPlan:
    """Return the plan of a sharded unit; what was frozen later counts as frozen."""
    return replace(
        state.handle.layout.plan,
        fqn=fqn,
        options=_options_in_force(state),
        int8_gradients=state.handle.rule.hook is int8_all_to_all_hook,
    )


def _options_in_force(state: _FSDPState) -> UnitOptions:
    """Return the unit's options, with ``set_reshard_after_forward`` as a strategy."""
    options = state.options
    reshards = state.settings.reshard_after_forward
    # The first forward sets the flag of a root, which every plan keeps full anyway.
    if state._is_root or reshards is None or reshards == options.reshard_after_forward:
        return options
    # Each of a pair is the other with another flag; NO_SHARD has nothing to reshard.
    other = {**RESHARDING, **{kept: freed for freed, kept in RESHARDING.items()}}
    if options.placement is not None:
        between = options.placement.parameters if reshards else ()
        return replace(options, placement=replace(options.placement, between=between))
    return replace(options, strategy=other.get(options.strategy, options.strategy))
