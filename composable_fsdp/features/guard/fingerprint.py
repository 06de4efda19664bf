"""The facts of units in which all ranks must agree, and their order of comparison.

Facts are texts::

    unit 3    'blocks.2'
    the shape of parameter 'blocks.2.weight'    (8, 8)
    the option strategy                FULL_SHARD
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from composable_fsdp.features.guard.compare import tag_of
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import slot_paths
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning.options import PER_MODULE, UnitOptions
from composable_fsdp.tree.changed_settings import (
    option_text,
    setting_values,
)
from composable_fsdp.tree.state import _FSDPState

Units: TypeAlias = Sequence[tuple[str, _FSDPState]]
"""Units with their names from the outermost unit."""

_NAMES, _SHAPE, _DTYPE, _FLAG, _OPTION, _PLACE = range(6)
"""Kinds of facts, in the order of comparison."""

_WORDS = {
    _SHAPE: "the shape",
    _DTYPE: "the dtype",
    _FLAG: "requires_grad",
    _PLACE: "the flat buffer",
}
Fact: TypeAlias = tuple[int, int, tuple[str, ...], str]
"""Kind, number in the unit, the names that it is about, and its value."""


class UnitFacts(NamedTuple):
    """The facts of a unit."""

    name: str
    parameters: tuple[Fact, ...]
    options: tuple[Fact, ...]
    above: str
    """Stands before the names of parameters."""


def facts_of(units: Units, *, parts: bool = False) -> tuple[UnitFacts, ...]:
    """Return the facts of ``units``; with ``parts`` those equal over other parts."""
    names = {id(state): name for name, state in units}
    # Most units are alike: their plans share the objects with these identities.
    parameters: dict[int, tuple[Fact, ...]] = {}
    options: dict[tuple[object, ...], tuple[Fact, ...]] = {}
    found = []
    for name, state in units:
        handle = state.handle
        # Units of several modules may share a plan; their paths differ.
        # Nor do parts of parameters, whose forms belong to the unit.
        owns = len(state.modules) > 1 or parts
        key = id(handle if owns else handle.layout.plan.regions)
        several = len(state.modules) > 1
        if key not in parameters:
            parameters[key] = tuple(_parameter_facts(handle, several, parts))
        # Numbers of ranks and not the ranks, which differ between replicas.
        named = setting_values(state, names)
        settings: tuple[object, ...] = (
            *(handle.groups.shard_world_size, handle.groups.replicas),
            handle.layout.device.type,
            # A backward compares this one by itself: ``no_sync`` changes often.
            state.settings.sync_gradients,
            *named.values(),
        )
        setting = id(state.options), *settings
        if setting not in options:
            told = _options_of(state.options)
            told |= zip((*_GROUPS, *named), map(str, settings), strict=True)
            options[setting] = _option_facts(told)
        above = "" if several else name
        found.append(UnitFacts(name, parameters[key], options[setting], above))
    return tuple(found)


def fingerprint_of(facts: Sequence[UnitFacts]) -> int:
    """Return a tag that is equal for equal facts, on every rank."""
    # The tag of facts that units share is computed once.
    parts = {id(p): p for each in facts for p in (each.parameters, each.options)}
    tags = {key: tag_of(part) for key, part in parts.items()}
    return tag_of(
        [(e.name, tags[id(e.parameters)], tags[id(e.options)]) for e in facts]
    )


def _parameter_facts(
    handle: FlatParamHandle, several: bool, parts: bool
) -> Iterator[Fact]:
    """Yield the facts of a unit's parameters; with ``parts`` of all parts of them."""
    forms = handle.layout.forms
    for number, region in enumerate(handle.layout.plan.regions):
        for slot in region.parameters:
            names = tuple(slot_paths(handle, slot) if several else slot.fqns)
            i, one = slot.index, names[:1]
            shape = forms[i].whole_shape(slot.shape) if parts else slot.shape
            yield _NAMES, i, names, ""
            yield _SHAPE, i, one, str(tuple(shape))
            yield _DTYPE, i, one, option_text(region.dtype)
            yield _FLAG, i, one, str(region.trainable)
            # Regions hold what a rank has, and parts differ in size.
            if not parts:
                place = f"number {number + 1} from element {slot.offset}"
                yield _PLACE, i, one, place


def _options_of(options: UnitOptions) -> dict[str, str]:
    """Return the options, but one."""
    # ``forward_prefetch`` is told in detail elsewhere.
    names = [name for name in PER_MODULE if name != "forward_prefetch"]
    return {name: option_text(getattr(options, name)) for name in names}


def _option_facts(options: Mapping[str, str]) -> tuple[Fact, ...]:
    """Return facts of options by name."""
    return tuple(
        (_OPTION, number, (name,), value)
        for number, (name, value) in enumerate(options.items())
    )


_GROUPS = (
    *("ranks per shard group", "number of replicas", "device type"),
    "reduction of gradients in backward",
)


def told_facts(units: Sequence[UnitFacts]) -> dict[tuple[int, ...], tuple[str, str]]:
    """Return each fact by its place in the comparison: what it is, and its value."""
    found: dict[tuple[int, ...], tuple[str, str]] = {}
    for k, unit in enumerate(units):
        # Names of units come before all else: a module that is a unit on some ranks
        # only would be told as parameters that are missing in the unit above.
        found[0, k] = f"unit number {k + 1} of the model", quoted(unit.name)
        at = f"of unit {quoted(unit.name)}"
        for _, number, (name,), value in unit.options:
            found[1, k, _OPTION, number] = f"the option {name} {at}", value
        for kind, number, names, value in unit.parameters:
            full, *tied = (quoted(join_name(unit.above, name)) for name in names)
            told = f"{_WORDS.get(kind)} of parameter {full}", value
            if kind == _NAMES:
                others = f" (tied to {', '.join(tied)})" if tied else ""
                told = f"parameter {number + 1} {at}", full + others
            found[1, k, kind, number] = told
    return found
