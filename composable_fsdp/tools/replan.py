"""Plans the units of a ``ShardingPlan`` again, on other ranks or with other options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from composable_fsdp.comm.nodes import group_sizes
from composable_fsdp.config import HYBRID, ShardingStrategy
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.planner import lay_out_again
from composable_fsdp.planning.unit_plan import UnitPlan, padding_notes
from composable_fsdp.tools.sharding_plan import ShardingPlan


def replan(
    plan: ShardingPlan,
    *,
    world_size: int | None = None,
    shard_world_size: int | None = None,
    **changes: Any,
) -> ShardingPlan:
    """Return the plan of the same units on other ranks or with other options.

    Args:
        plan: the plan to change.
        world_size: number of ranks in all. Default None: that of ``plan``.
        shard_world_size: ranks per shard group. Default None: that of ``plan``, if
            ``plan`` has replicas and the size divides ``world_size``; else all ranks.
        **changes: options of ``plan()`` by name, such as ``strategy``; they replace the
            options of every unit.

    Returns: the plan; equal to ``plan()`` of the same model with these arguments.
    Raises: PlanError, if ``world_size`` is no multiple of ``shard_world_size``, or if a
    hybrid strategy has no ``shard_world_size``.
    """
    ranks = plan.world_size if world_size is None else world_size
    if shard_world_size is None:
        shard_world_size = _shard_world_size(plan, ranks)
    units = [
        _replan_unit(unit, replace(unit.options, **changes), ranks, shard_world_size)
        for unit in plan.units
    ]
    # Padding depends on the ranks, and so do the sentences about it.
    notes = tuple(note for unit in units for note in padding_notes(unit))
    return ShardingPlan(tuple(units), ranks, notes)


def _shard_world_size(plan: ShardingPlan, ranks: int) -> int | None:
    """Return the size of the plan's shard groups; None for a group of all ranks."""
    for unit in plan.units:
        strategy, size = unit.options.strategy, unit.shard_world_size
        # NO_SHARD replicates over all ranks and says nothing about groups.
        if strategy is ShardingStrategy.NO_SHARD:
            continue
        if unit.replicas > 1 or strategy in HYBRID:
            if ranks > size and ranks % size:
                raise PlanError(
                    f"The plan has shard groups of {size} ranks, which do not divide "
                    f"{ranks} ranks. Choose a multiple of {size}, or pass "
                    "shard_world_size."
                )
            # Fewer ranks than a group are one group.
            return min(size, ranks)
    return None


def _replan_unit(
    unit: UnitPlan, options: UnitOptions, ranks: int, shard_world_size: int | None
) -> UnitPlan:
    """Lay out the parameters of ``unit``, as ``planner._build`` does."""
    sizes = group_sizes(
        options.strategy, world_size=ranks, shard_world_size=shard_world_size
    )
    # Equal units of the old and the new plan share their layouts.
    if options == unit.options and sizes == (unit.shard_world_size, unit.replicas):
        return unit
    return replace(
        unit,
        regions=lay_out_again(unit, options, sizes[0]),
        options=options,
        shard_world_size=sizes[0],
        replicas=sizes[1],
    )
