"""The facts of units in which all ranks must agree, and their order of comparison.

Facts are plain text and integers::

    unit 3   name         'blocks.2'
             parameters   names, shape, dtype, requires_grad, region
             options      strategy, dtypes, prefetch, divisor, number of ranks, ..
             buffers      names
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from composable_fsdp.features.guard.compare import tag_of
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import slot_paths
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning.options import UnitOptions, in_force
from composable_fsdp.planning.walk import modules, named
from composable_fsdp.tree.changed_settings import (
    COMPARED_LATER,
    option_text,
    setting_values,
)
from composable_fsdp.tree.state import OWNERS, _FSDPState

Units: TypeAlias = Sequence[tuple[str, _FSDPState]]
"""Units with their names from the outermost unit."""

ParameterFacts: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], str, bool]
"""Names from the unit's module (paths, in a unit of several modules), shape, dtype and
requires_grad. The place in a buffer follows from these and from the options."""

Options: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of an option's name and its value as text."""


class UnitFacts(NamedTuple):
    """The facts of a unit."""

    name: str
    parameters: tuple[ParameterFacts, ...]
    options: Options
    buffers: tuple[str, ...]
    several: bool
    """Whether the unit has several modules; its parameters then have paths."""


def facts_of(
    units: Units,
    buffers: Mapping[int, Sequence[str]],
    *,
    parts: bool = False,
) -> tuple[UnitFacts, ...]:
    """Return the facts of ``units``; with ``parts`` those equal over other parts."""
    names = {id(state): name for name, state in units}
    # Most units are alike: their plans share the objects with these identities.
    parameters: dict[int, tuple[ParameterFacts, ...]] = {}
    options: dict[tuple[object, ...], Options] = {}
    found = []
    for name, state in units:
        several = len(state.modules) > 1
        # Units of several modules may share a plan; their paths differ.
        # Nor do parts of parameters, whose forms belong to the unit.
        key = id(state.handle if several or parts else state.handle.layout.plan.regions)
        if key not in parameters:
            found_here = _parameter_facts(state.handle, several=several)
            parameters[key] = _of_all_parts(state, found_here) if parts else found_here
        groups = state.handle.groups
        # Numbers of ranks and not the ranks, which differ between replicas.
        settings: tuple[object, ...] = (
            *(groups.shard_world_size, groups.replicas),
            state.handle.layout.device.type,
            # A backward compares this one by itself: ``no_sync`` changes often.
            state.settings.sync_gradients,
            *setting_values(state, names),
        )
        setting = id(state.options), *settings
        if setting not in options:
            pairs = zip((*_GROUPS, *COMPARED_LATER), map(str, settings), strict=True)
            options[setting] = (*_option_facts(state.options), *pairs)
        had = () if parts else tuple(buffers.get(id(state), ()))
        found.append(UnitFacts(name, parameters[key], options[setting], had, several))
    return tuple(found)


def _of_all_parts(
    state: _FSDPState, parameters: Sequence[ParameterFacts]
) -> tuple[ParameterFacts, ...]:
    """Return the facts of ``parameters`` that are equal on the ranks of other parts."""
    forms = state.handle.layout.forms
    # Regions hold what a rank has, and parts differ in size.
    return tuple(
        [
            (names, forms[index].whole_shape(shape), dtype, trains)
            for index, (names, shape, dtype, trains) in enumerate(parameters)
        ]
    )


def fingerprint_of(facts: Sequence[UnitFacts]) -> int:
    """Return a tag that is equal for equal facts, on every rank."""
    # The tag of a part that units share is computed once.
    parts = {id(p): p for each in facts for p in (each.parameters, each.options)}
    tags = {key: tag_of(part) for key, part in parts.items()}
    return tag_of(
        [
            (e.name, tags[id(e.parameters)], tags[id(e.options)], e.buffers)
            for e in facts
        ]
    )


def buffer_names(top: _FSDPState) -> dict[int, list[str]]:
    """Return the names of buffers below ``top``, by identity of the unit's state."""
    found: dict[int, list[str]] = {}
    for module in top.modules:
        # Most models have no buffers, and need no names.
        if not any(each._buffers for each in modules(module)):
            continue
        for name, each in named(module):
            if each._buffers and (owner := OWNERS.get(each)) is not None:
                names = [join_name(name, key) for key in each._buffers]
                found.setdefault(id(owner), []).extend(names)
    return found


def _parameter_facts(
    handle: FlatParamHandle, *, several: bool
) -> tuple[ParameterFacts, ...]:
    """Return the facts of a unit's parameters, in the order of the module."""
    found = {
        slot.index: (
            tuple(slot_paths(handle, slot)) if several else slot.fqns,
            slot.shape,
            option_text(region.dtype),
            region.trainable,
        )
        for region in handle.layout.plan.regions
        for slot in region.parameters
    }
    return tuple([found[index] for index in sorted(found)])


def _option_facts(options: UnitOptions) -> Options:
    """Return the options that have an effect."""
    found = in_force(options)
    del found["forward_prefetch"]  # told in detail elsewhere
    return tuple((name, option_text(value)) for name, value in found.items())


_GROUPS = (
    *("ranks per shard group", "number of replicas", "device type"),
    "reduction of gradients in backward",
)

_NAMES, _SHAPE, _DTYPE, _FLAG, _OPTION, _BUFFER = range(6)
"""Kinds of facts, in the order of comparison."""


def told_facts(units: Sequence[UnitFacts]) -> dict[tuple[int, ...], tuple[str, str]]:
    """Return each fact by its place in the comparison: what it is, and its value."""
    found: dict[tuple[int, ...], tuple[str, str]] = {}
    for k, unit in enumerate(units):
        # Names of units come before all else: a module that is a unit on some ranks
        # only would be told as parameters that are missing in the unit above.
        at = f"of unit {quoted(unit.name)}"
        found[0, k] = f"unit number {k + 1} of the model", quoted(unit.name)
        for j, (names, shape, dtype, trainable) in enumerate(unit.parameters):
            full = names if unit.several else [join_name(unit.name, n) for n in names]
            this = f"of parameter {quoted(full[0])}"
            tied = f" (tied to {', '.join(map(quoted, full[1:]))})" if full[1:] else ""
            found[1, k, _NAMES, j] = f"parameter {j + 1} {at}", quoted(full[0]) + tied
            found[1, k, _SHAPE, j] = f"the shape {this}", str(tuple(shape))
            found[1, k, _DTYPE, j] = f"the dtype {this}", dtype
            found[1, k, _FLAG, j] = f"requires_grad {this}", str(trainable)
        for j, (name, value) in enumerate(unit.options):
            found[1, k, _OPTION, j] = f"the option {name} {at}", value
        # Buffers last: no collective of the step sends them.
        for j, name in enumerate(unit.buffers):
            found[1, k, _BUFFER, j] = f"buffer {j + 1} {at}", quoted(name)
    return found
