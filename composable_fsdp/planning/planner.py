"""Plans one application of ``fully_shard``: a module tree becomes ``Target``s.

Planning runs every check before any tensor moves, so a refused model stays unchanged::

    modules --assign_units--> Unit --_build--> UnitPlan     integers and names, cached
                                '-----_target----> Target   the plan and live objects
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.comm.groups import group_sizes
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.assign import Occurrence, PlanRequest, Unit, assign_units
from composable_fsdp.planning.checks import group_of
from composable_fsdp.planning.dtensors import local_of, whole_of
from composable_fsdp.planning.layout import (
    Whole,
    plan_regions,
)
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.places import Place
from composable_fsdp.planning.unit_plan import UnitPlan, padding_notes


class Target(NamedTuple):
    """The live objects (modules, parameters) behind one ``UnitPlan``."""

    plan: UnitPlan
    modules: tuple[nn.Module, ...]
    """The modules passed to ``fully_shard`` as this unit; usually a single module."""
    members: tuple[nn.Module, ...]
    """``modules``, and the modules below whose nearest enclosing unit is this unit."""
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    """The parameters, by region and then by slot of the region."""
    places: tuple[Place, ...]
    """Every place of every parameter, in the order of ``parameters``."""
    """Per entry of ``places``, the parameter's key in ``module._parameters``."""
    owners: tuple[nn.Module, ...]
    """Per entry of ``places``, the module that holds the parameter there."""
    parent: int
    """Index of the enclosing unit's target; the first target is its own parent."""
    units_below: tuple[object, ...]
    """States of units from earlier ``fully_shard`` calls directly below this unit."""


def plan_targets(
    modules: Sequence[nn.Module], request: PlanRequest
) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Plan one application of ``fully_shard`` to ``modules``.

    Several modules form a single unit. The function reads the tree and changes nothing.

    Returns: a ``Target`` per unit in ``.modules()`` order, and sentences for a reader.
    Raises: PlanError or CompositionError, naming the module, the parameter and the
    remedy.
    """
    units = assign_units(modules, request)
    notes: list[str] = []
    targets = tuple(_target(i, unit, request, notes) for i, unit in enumerate(units))
    return targets, tuple(notes)


class _Build(NamedTuple):
    """The integers and names of a unit's plan; equal units share a single object."""

    plan: UnitPlan
    order: tuple[tuple[int, ...], ...]
    """Per region, the indices of its parameters in the unit's walking order."""
    places: tuple[Place, ...]
    notes: tuple[str, ...]


_Known = tuple[
    tuple[str, ...],
    tuple[tuple[str, str], ...],
    tuple[int, ...],
    torch.dtype,
    bool,
    Hashable,
    Whole | None,
    tuple[int, ...] | None,
]
"""The cache key of a parameter.

The entries: the parameter's names, the places as (name from the unit, key), the shape,
the dtype, ``requires_grad``, the answer of ``group_by``, the place in the global
parameter, and the strides if not contiguous.
"""


def _target(index: int, unit: Unit, request: PlanRequest, notes: list[str]) -> Target:
    """Build the ``Target`` of unit ``index``; append its warnings to ``notes``."""
    sizes = request.sizes or partial(group_sizes, world_size=request.world_size)
    found = [_places(occurrences, index) for _, occurrences in unit.parameters]
    by = unit.options.group_by
    known = [
        (
            names,
            places,
            parameter.shape,
            parameter.dtype,
            parameter.requires_grad,
            by and group_of(by, join_name(unit.fqn, names[0]), parameter),
            None,
            # No question to most parameters.
            _channels_last(parameter) if parameter.dim() > 3 else None,
        )
        # A DTensor has a class of its own; the plan lays out this rank's rectangle.
        if type(parameter) is nn.Parameter
        else (
            names,
            places,
            local_of(parameter).shape,
            parameter.dtype,
            parameter.requires_grad,
            by and group_of(by, join_name(unit.fqn, names[0]), parameter),
            whole_of(parameter),
            None,
        )
        for (names, places, _), (parameter, _) in zip(
            found, unit.parameters, strict=True
        )
    ]
    # The cache keeps all arguments alive. ``options`` would keep the user's
    # ``group_by``, and the model that this function may refer to, so such units bypass
    # the cache.
    build_unit = _build if by is None else _build.__wrapped__
    build = build_unit(
        unit.fqn,
        type(unit.modules[0]).__name__,
        unit.options,
        tuple(known),
        sizes(unit.options.strategy),
    )
    notes.extend(build.notes)
    return Target(
        build.plan,
        unit.modules,
        tuple(unit.members),
        tuple([tuple([unit.parameters[i][0] for i in r]) for r in build.order]),
        # Equal units share these tuples of names; only the objects differ per unit.
        build.places,
        tuple([owner for r in build.order for i in r for owner in found[i][2]]),
        unit.parent,
        tuple(unit.units_below),
    )


def _channels_last(parameter: nn.Parameter) -> tuple[int, ...] | None:
    """Return the strides of a parameter in a channels_last format, else None."""
    if parameter.is_contiguous() or parameter.dim() > 5:
        return None
    three = parameter.dim() == 5
    kind = torch.channels_last_3d if three else torch.channels_last
    found = parameter.is_contiguous(memory_format=kind)
    return parameter.stride() if found else None


@lru_cache(maxsize=4096)
def _build(
    fqn: str,
    class_name: str,
    options: UnitOptions,
    parameters: tuple[_Known, ...],
    sizes: tuple[int, int],
) -> _Build:
    """Plan a single unit.

    Equal arguments, as for equal transformer blocks, return the same object. ``sizes``
    holds the size of the shard group and the number of replicas.
    """
    regions = plan_regions(
        [
            options.spec(names, tuple(shape), dtype, trainable, group, whole, strides)
            for names, _, shape, dtype, trainable, group, whole, strides in parameters
        ],
        world_size=sizes[0],
    )
    plan = UnitPlan(fqn, class_name, regions, options, *sizes)
    # Regions sort their slots; ``order`` maps the slots back to the walk's order.
    order = tuple(tuple(s.index for s in region.parameters) for region in regions)
    places = [
        Place(name, key, parameters[i][0][0], i)
        for region in order
        for i in region
        for name, key in parameters[i][1]
    ]
    return _Build(plan, order, tuple(places), tuple(padding_notes(plan)))


def _places(
    occurrences: list[Occurrence], index: int
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[nn.Module, ...]]:
    """Return a parameter's names from its unit, its places, and each place's owner.

    A module that is reachable along two paths holds the parameter once, but adds two
    names.
    """
    # Nearly every parameter has a single place; this branch saves three dicts per
    # parameter.
    if len(occurrences) == 1:
        (o,) = occurrences
        # A unit at the root of the walk: names are relative already.
        first = o.fqn if len(o.chain) == 1 else _relative(o, index)
        return (first,), ((first, o.name),), (o.module,)
    names: dict[str, None] = {}
    places: dict[tuple[int, str], tuple[str, str]] = {}
    owners: dict[tuple[int, str], nn.Module] = {}
    for o in occurrences:
        fqn = _relative(o, index)
        names[fqn] = None
        # Keyed by module identity and key, so that a shared module counts as a single
        # place.
        places.setdefault((id(o.module), o.name), (fqn, o.name))
        owners.setdefault((id(o.module), o.name), o.module)
    return tuple(names), tuple(places.values()), tuple(owners.values())


def _relative(place: Occurrence, index: int) -> str:
    """Return the name of ``place`` from the module of unit ``index``."""
    # A unit's module that is reachable along two paths has two names. The prefix to
    # remove is the name on the path of this occurrence, which the chain records.
    for unit, length in place.chain[::-1]:
        if unit == index:
            return place.fqn[length + 1 :] if length else place.fqn
    raise AssertionError(f"{place.fqn} is not below unit {index}")


def as_list(given: Iterable[Any] | None, argument: str) -> list[Any]:
    """Return the value of ``argument``, which may be an iterator, as a list.

    Raises: TypeError, naming ``argument``, if ``given`` is a module, a tensor or no
    iterable.
    """
    if given is None:
        return []
    # nn.Sequential and torch.Tensor are iterable, so a forgotten list must be refused
    # by type.
    if isinstance(given, (nn.Module, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(
            f"{argument} expects a list, got a {type(given).__name__}. Pass [it]."
        )
    return list(given)


def expand_ignored(
    ignored_modules: Sequence[nn.Module] | None, ignored_states: Sequence[Any] | None
) -> frozenset[nn.Module]:
    """Return all ignored modules: the given modules and every module below them.

    Raises: TypeError, if ``ignored_modules`` holds an object that is no module.
    """
    if not ignored_modules and not ignored_states:
        return frozenset()
    given = list(ignored_modules or ())
    given += [state for state in ignored_states or () if isinstance(state, nn.Module)]
    for module in given:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"ignored_modules expects modules, got {type(module).__name__}; pass "
                "parameters as ignored_states."
            )
    return walk.subtrees(given)


def ignored_parameters(ignored_states: Sequence[Any] | None) -> frozenset[int]:
    """Return the ids of the parameters that ``ignored_states`` names directly.

    Raises: TypeError, if an entry is neither a parameter nor a module.
    """
    if not ignored_states:
        return frozenset()
    for state in ignored_states:
        if not isinstance(state, (nn.Parameter, nn.Module)):
            raise TypeError(
                "ignored_states expects parameters or modules, got "
                f"{type(state).__name__}."
            )
    return frozenset(
        id(state) for state in ignored_states if isinstance(state, nn.Parameter)
    )


def check_tied(value: str) -> str:
    """Return ``value`` if it is a valid ``tied_params``: "error" or "promote".

    Raises: PlanError, for any other value.
    """
    if value not in ("error", "promote"):
        raise PlanError(f"tied_params expects 'error' or 'promote', got {value!r}.")
    return value
