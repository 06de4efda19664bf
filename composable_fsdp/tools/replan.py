"""Plans the units of a ``ShardingPlan`` again, on other ranks or with other options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from composable_fsdp.comm.nodes import group_sizes
from composable_fsdp.comm.placements import Ways, placement_of
from composable_fsdp.config import HYBRID
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
    same_ranks = shard_world_size is None and ranks == plan.world_size
    units = []
    for unit in plan.units:
        options = replace(unit.options, **changes)
        ways = unit.ways
        if not same_ranks or options.chosen != unit.options.chosen:
            size = shard_world_size or _shard_world_size(plan, ranks)
            ways = group_sizes(options.chosen, world_size=ranks, shard_world_size=size)
        units.append(_replan_unit(unit, options, ways))
    # Padding depends on the ranks, and so do the sentences about it.
    notes = tuple(note for unit in units for note in padding_notes(unit))
    return ShardingPlan(tuple(units), ranks, notes)


def _shard_world_size(plan: ShardingPlan, ranks: int) -> int | None:
    """Return the size of the plan's shard groups; None for a group of all ranks."""
    for unit in plan.units:
        row = placement_of(unit.options.chosen)
        # NO_SHARD replicates over all ranks and says nothing about groups.
        if not row.states:
            continue
        if unit.options.placement is not None:
            raise PlanError(
                f"The plan has units of {unit.options.placement}, and does not know "
                "the sizes of its dims. Pass shard_world_size."
            )
        # HFSDP divides states over all ranks, and parameters over a group.
        is_grid = unit.options.strategy in HYBRID
        size = unit.parameter_ranks if is_grid else unit.shard_world_size
        if unit.replicas > 1 or is_grid:
            if ranks > size and ranks % size:
                raise PlanError(
                    f"The plan has shard groups of {size} ranks, which do not divide "
                    f"{ranks} ranks. Choose a multiple of {size}, or pass "
                    "shard_world_size."
                )
            # Fewer ranks than a group are one group.
            return min(size, ranks)
    return None


def _replan_unit(unit: UnitPlan, options: UnitOptions, ways: Ways) -> UnitPlan:
    """Lay out the parameters of ``unit``, as ``planner._build`` does."""
    # Equal units of the old and the new plan share their layouts.
    if options == unit.options and ways == unit.ways:
        return unit
    regions = lay_out_again(unit, options, ways.shard_world_size)
    return replace(unit, regions=regions, options=options, **ways._asdict())
