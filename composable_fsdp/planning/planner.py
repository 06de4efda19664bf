"""Plans one application of ``fully_shard``: a module tree becomes ``Target``s.

Planning runs every check before any tensor moves, so a refused model stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from torch import nn

from composable_fsdp.comm.placements import Choice, Ways, group_sizes
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.assign import Occurrence, PlanRequest, Unit, assign_units
from composable_fsdp.planning.dtensors import local_of, whole_of
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.partition import plan_regions
from composable_fsdp.planning.unit_plan import Place, UnitPlan


class Target(NamedTuple):
    """The live objects (modules, parameters) behind one ``UnitPlan``."""

    plan: UnitPlan
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    places: tuple[Place, ...]
    """Every place of every parameter, in the order of ``parameters``."""
    owners: tuple[nn.Module, ...]
    """Per entry of ``places``, the module that holds the parameter there."""
    modules: tuple[nn.Module, ...] = ()
    """The modules passed to ``fully_shard`` as this unit; usually a single module."""
    members: tuple[nn.Module, ...] = ()
    """``modules``, and the modules below whose nearest enclosing unit is this unit."""
    parent: int = 0
    """Index of the enclosing unit's target; the first target is its own parent."""
    units_below: tuple[object, ...] = ()
    """States of units from earlier ``fully_shard`` calls directly below this unit."""


def plan_targets(
    modules: Sequence[nn.Module], request: PlanRequest
) -> tuple[Target, ...]:
    """Return a ``Target`` per unit in ``.modules()`` order."""
    units = assign_units(modules, request)
    sizes = request.sizes or partial(group_sizes, world_size=request.world_size)
    has_others = len(units) > 1
    return tuple(
        [_target(i, unit, sizes, has_others=has_others) for i, unit in enumerate(units)]
    )


_Facts = tuple[Any, ...]
"""What the plan of a parameter follows from: names, places, arguments of ``spec``."""


def _target(
    index: int, unit: Unit, sizes: Callable[[Choice], Ways], *, has_others: bool
) -> Target:
    """Build the ``Target`` of unit ``index``."""
    found: list[tuple[_Facts, tuple[nn.Module, ...]]] = []
    for parameter, occurrences in unit.parameters:
        first, *others = occurrences
        # Nearly every parameter has one place.
        if others:
            names, places, owners = _places(occurrences, index)
        else:
            # Not ``path``, which is a call per parameter.
            plain = first.prefix + first.key
            fqn = first.name_in(index) if has_others else plain
            names, places, owners = (fqn,), ((fqn, first.key),), (first.module,)
        is_plain = type(parameter) is nn.Parameter
        facts = (
            names,
            places,
            # Of a DTensor, the plan lays out this rank's rectangle.
            parameter.shape if is_plain else local_of(parameter).shape,
            parameter.dtype,
            parameter.requires_grad,
            None if is_plain else whole_of(parameter),
        )
        found.append((facts, owners))
    plan, all_places = _plan_unit(
        unit.fqn,
        type(unit.modules[0]).__name__,
        unit.options,
        tuple([facts for facts, _ in found]),
        sizes(unit.options.chosen),
    )
    # Regions sort their slots; ``indices`` map the slots back to the walk's order.
    order = [region.indices for region in plan.regions]
    return Target(
        plan,
        tuple([tuple([unit.parameters[i][0] for i in r]) for r in order]),
        all_places,
        tuple([owner for r in order for i in r for owner in found[i][1]]),
        unit.modules,
        tuple(unit.members),
        unit.parent,
        tuple(unit.units_below),
    )


@lru_cache(maxsize=4096)
def _plan_unit(
    fqn: str,
    class_name: str,
    options: UnitOptions,
    parameters: tuple[_Facts, ...],
    sizes: Ways,
) -> tuple[UnitPlan, tuple[Place, ...]]:
    """Plan a unit; equal arguments, as of equal blocks, return the same objects."""
    specs = tuple([options.spec(names, *facts) for names, _, *facts in parameters])
    regions = plan_regions(specs, sizes.shard_world_size)
    plan = UnitPlan(fqn, class_name, regions, options, *sizes)
    # Pieces hold values in the compute dtype, and are gathered as they are.
    if plan.piece_ranks and options.wire is not None:
        raise PlanError(
            f"wire={options.wire} expects full parameters that are gathered from "
            f"the shards, and {options.chosen} of unit {fqn or ROOT_NAME} "
            "keeps a part of them. Leave wire out."
        )
    places = [
        Place(name, key, i)
        for region in regions
        for i in region.indices
        for name, key in parameters[i][1]
    ]
    return plan, tuple(places)


def lay_out_again(
    unit: UnitPlan, options: UnitOptions, world_size: int
) -> tuple[RegionLayout, ...]:
    """Lay out a unit's parameters with other options or ranks."""
    # In the order of the walk, as ``slots``. The block comes from the shape, because a
    # slot of a single rank has block 1.
    specs = [
        options.spec(slot.fqns, slot.shape, region.dtype, region.trainable, slot.whole)
        for slot, region in unit.slots
    ]
    return plan_regions(tuple(specs), world_size)


def _places(
    occurrences: list[Occurrence], index: int
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[nn.Module, ...]]:
    """Return a parameter's names from its unit, its places, and each place's owner."""
    # A module that is reachable along two paths is one place with two names.
    names: dict[str, None] = {}
    places: dict[tuple[int, str], tuple[tuple[str, str], nn.Module]] = {}
    for each in occurrences:
        fqn = each.name_in(index)
        names[fqn] = None
        found = (fqn, each.key), each.module
        places.setdefault((id(each.module), each.key), found)
    of_places, owners = zip(*places.values(), strict=True)
    return tuple(names), of_places, owners
