"""Entry points ``plan``, of a model before or after sharding, and ``replan``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from composable_fsdp.comm.placements import ROWS, SHARD, group_sizes, placement_of
from composable_fsdp.compose.registry import API, get_state
from composable_fsdp.config import HYBRID, TiedParams
from composable_fsdp.entries.apply import request_for
from composable_fsdp.entries.fully_shard import FSDP2_NAMES, unknown_text
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import WRAPPED_MODULE
from composable_fsdp.planning import walk
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.planner import lay_out_again, plan_targets
from composable_fsdp.planning.policies import AnyPolicy
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.models import check_sizes, chosen_units
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import require_module, walk_states


def plan(
    module: nn.Module,
    *,
    world_size: int | None = None,
    shard_world_size: int | None = None,
    policy: AnyPolicy | None = None,
    units: Iterable[nn.Module | str | Sequence[nn.Module | str]] | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    tied_params: TiedParams = "error",
    **options: Any,
) -> ShardingPlan:
    """Return the plan of ``fully_shard`` for ``module`` on ``world_size`` ranks.

    Planning needs no process group, works on meta-device models and changes nothing.
    ``print()`` the result for a report; ``forecast`` adds an optimizer.

    The units are those of ``policy`` or of ``units``. Modules that are sharded already
    are units as they are: with their parameters, options and ranks, or with the same
    on ``world_size`` ranks.

    Args:
        module: the module to plan, or a model that is sharded, as a whole or in part.
        world_size: number of ranks in all. Default None: the ranks over which
            ``module`` is sharded.
        shard_world_size: number of ranks in a shard group; the group's ranks share the
            parameters, and ``world_size // shard_world_size`` groups hold replicas, as
            on a 2-D mesh ``(world_size // shard_world_size, shard_world_size)``. Must
            divide ``world_size``. Default None: a single shard group of all ranks.
        policy: selects the modules below ``module`` that become units: a policy object,
            a function ``(module, recurse, nonwrapped_numel) -> bool``, or a function
            that returns ``{module: options}``. Default None: ``module`` is the only
            unit.
        units: the units below ``module``, instead of ``policy``: modules, names, or
            patterns of names such as "blocks.*"; a list of them in the list is one
            unit. So ``units=model.blocks`` plans ``for block in model.blocks:
            fully_shard(block)``. Default None: no units below ``module``.
        ignored_modules: modules to leave unsharded, with all below. Default None.
        ignored_states: parameters, or modules, to leave unsharded. Default None.
        tied_params: "error" (default) refuses a parameter that is tied across units;
            "promote" gives the parameter to the lowest unit above all its places.
        **options: the options of a unit, as of ``fully_shard``: ``strategy`` or
            ``placement``, ``mixed_precision``, ``cpu_offload``, ``backward_prefetch``,
            ``forward_prefetch``, ``limit_all_gathers``, ``block``, ``wire``
            and ``arena``.

    Returns: the plan. Sizes are in elements; fields named ``*_bytes`` are in bytes.
    Raises: TypeError, if ``module`` is no module; PlanError, for options of a module
    that is sharded, or without ``world_size`` for a module that is not; PlanError or
    CompositionError, as ``fully_shard`` raises them.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    >>> plan(model, world_size=4).units[0].regions[0].shard_numel
    40
    >>> [unit.fqn for unit in plan(model, world_size=4, units=["*"]).units]
    ['', '0', '1']
    """
    require_module(module, "plan")
    if policy is not None and units is not None:
        raise PlanError(
            "plan expects policy or units, not both: each selects the units."
        )
    known = [each.name for each in fields(UnitOptions)]
    if unknown := sorted(options.keys() - set(known)):
        # A plan knows numbers of ranks and no mesh.
        here = "world_size, and shard_world_size for a 2-D mesh"
        meshes = ("mesh", "device_mesh", "dp_mesh_dims", "process_group")
        names = {**FSDP2_NAMES, **dict.fromkeys(meshes, here)}
        takes = ["world_size", "shard_world_size", "policy", "units", *known]
        raise TypeError(unknown_text(unknown, takes, "plan", names))
    chosen = UnitOptions(**options)
    # The wrapper is no unit; the wrapped module is.
    wrapped = module._modules.get(WRAPPED_MODULE)
    if wrapped is not None and get_state(wrapped, API) is not None:
        module = wrapped
    others = (policy, units, ignored_modules, ignored_states, tied_params != "error")
    kept, ranks = _kept(module, world_size, shard_world_size)
    # The root is sharded, so no parameter is left.
    if kept is not None and not kept.units[0].fqn:
        if chosen != UnitOptions() or any(others):
            raise PlanError(
                "plan got options for a module that is sharded already, and whose "
                "units have their options. Pass world_size and shard_world_size only, "
                "or plan a fresh model, on meta for example."
            )
        return kept
    request = request_for(
        chosen,
        ranks,
        sizes=partial(group_sizes, world_size=ranks, shard_world_size=shard_world_size),
        policy=policy,
        chosen={} if units is None else chosen_units(module, units),
        ignored_modules=ignored_modules,
        ignored_states=ignored_states,
        tied_params=tied_params,
    )
    # As ``fully_shard(module)`` would shard it next: the walk takes sharded units for
    # boundaries and leaves their parameters alone.
    targets = plan_targets([module], request)
    rest = ShardingPlan(tuple(map(attrgetter("plan"), targets)), ranks)
    if kept is None:
        return rest
    # Names of units are unique: a module is in one of the two plans.
    by_name = {unit.fqn: unit for unit in (*rest.units, *kept.units)}
    return ShardingPlan(
        tuple(by_name[name] for name, _ in walk.named(module) if name in by_name),
        ranks,
    )


def _kept(
    module: nn.Module, world_size: int | None, shard_world_size: int | None
) -> tuple[ShardingPlan | None, int]:
    """Return the plan of the units of ``module`` that are sharded, on so many ranks."""
    # The units of ``replicate`` are not planned.
    pairs = [(f, s) for f, each, s in walk_states(module) if get_state(each, API) is s]
    kept = plan_of_units(pairs) if pairs else None
    ranks = kept.world_size if kept is not None and world_size is None else world_size
    if ranks is None:
        raise PlanError(
            "plan expects world_size, the number of ranks, for a module that is not "
            "sharded. Pass for example world_size=8."
        )
    check_sizes(ranks, shard_world_size)
    # On the ranks of the units themselves, their regions are those of the process.
    if kept is not None and (ranks != kept.world_size or shard_world_size is not None):
        kept = replan(kept, world_size=ranks, shard_world_size=shard_world_size)
    return kept, ranks


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
        # Equal units of the old and the new plan share their layouts.
        if options != unit.options or ways != unit.ways:
            regions = lay_out_again(unit, options, ways.shard_world_size)
            unit = replace(unit, regions=regions, options=options, **ways._asdict())
        units.append(unit)
    return ShardingPlan(tuple(units), ranks)


def _shard_world_size(plan: ShardingPlan, ranks: int) -> int | None:
    """Return the size of the plan's shard groups; None for a group of all ranks."""
    for unit in plan.units:
        chosen, ways = unit.options.chosen, unit.ways
        placed = placement_of(chosen)
        # HFSDP divides states over all ranks, and parameters over a group. What is
        # whole, or over all ranks, says nothing about groups.
        size = {
            placed.states: ways.shard_world_size,
            placed.gradients: ways.gradient_ranks,
            placed.parameters: ways.parameter_ranks,
        }.get((SHARD,))
        every = unit.shard_world_size * unit.replicas
        if size and (size < every or chosen in HYBRID):
            if ranks > size and ranks % size:
                raise PlanError(
                    f"The plan has shard groups of {size} ranks, which do not divide "
                    f"{ranks} ranks. Choose a multiple of {size}, or pass "
                    "shard_world_size."
                )
            # Fewer ranks than a group are one group.
            return min(size, ranks)
    return None


def plan_of_units(units: Iterable[tuple[str, _FSDPState]]) -> ShardingPlan:
    """Return the plan of sharded units, one at least, outermost first."""
    plans = tuple([unit_plan(fqn, state) for fqn, state in units])
    # All units of a model are over the same ranks, in shards or replicas.
    return ShardingPlan(plans, plans[0].shard_world_size * plans[0].replicas)


def unit_plan(fqn: str, state: _FSDPState) -> UnitPlan:
    """Return the plan of a sharded unit; what was frozen later counts as frozen."""
    plan, options = state.handle.layout.plan, state.options
    between, reshards = plan.between_ranks, state.settings.reshard_after_forward
    # The first forward sets the flag of a root, which every plan keeps full anyway.
    is_set = reshards is not None and not state._is_root
    if is_set and reshards != options.reshard_after_forward:
        # What is whole at rest is gathered from the shards again, if it is freed.
        rest = plan.parameter_ranks
        freed = rest if rest > 1 else plan.shard_world_size
        options, between = _resharding(options, reshards), freed if reshards else 1
    return replace(
        plan,
        fqn=fqn,
        options=options,
        between_ranks=between,
    )


def _resharding(options: UnitOptions, reshards: bool | None) -> UnitOptions:
    """Return the options with ``set_reshard_after_forward`` as a placement."""
    chosen = options.chosen
    placed = placement_of(chosen)
    placed = replace(placed, between=placed.parameters if reshards else ())
    # By its name, if the unit was given one and another has the placement.
    for strategy, row in ROWS.items() if options.placement is None else ():
        if row == placed and (strategy in HYBRID) == (chosen in HYBRID):
            return replace(options, strategy=strategy)
    return replace(options, strategy=UnitOptions().strategy, placement=placed)
