"""The facts of a unit in which all ranks must agree, and the first that differs.

Facts are plain text and integers. Ranks compare a digest of all facts; if the digests
differ, the ranks exchange the facts themselves and ``first_difference`` finds the
place::

    unit 3   name         'blocks.2'
             parameters   names, shape, dtype, requires_grad, region
             options      strategy, dtypes, prefetch, divisor, number of ranks, ..
             buffers      names
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import slot_paths
from composable_fsdp.naming import join_name, quoted, ranks_text
from composable_fsdp.planning.options import UnitOptions, in_force, precision_fields
from composable_fsdp.planning.walk import modules, named
from composable_fsdp.tree.changed_settings import (
    COMPARED_LATER,
    option_text,
    setting_values,
)
from composable_fsdp.tree.state import OWNERS, _FSDPState

ParameterFacts: TypeAlias = tuple[
    tuple[str, ...], tuple[int, ...], str, bool, tuple[int, ...]
]
"""Names from the unit's module (paths, in a unit of several modules), shape, dtype,
requires_grad, and the parameter's place: number of the region, first element in the
region, then the strides if compute sees others than those of a contiguous parameter."""

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

    def paths(self, names: Sequence[str]) -> Sequence[str]:
        """Return the paths of a parameter from its names in ``parameters``."""
        return names if self.several else [join_name(self.name, n) for n in names]


class Difference(NamedTuple):
    """A fact in which ranks differ."""

    what: str
    """The fact in words, for example ``"the shape of parameter 'a.weight'"``."""
    values: dict[int, str]
    """By rank: the value in words."""


def facts_of(
    units: Sequence[tuple[str, _FSDPState]],
    buffers: Mapping[int, Sequence[str]],
    experts: int = 0,
    *,
    parts: bool = False,
) -> tuple[UnitFacts, ...]:
    """Return the facts of ``units``, which are given by name.

    Returns: the facts, in the order of ``units``.
    """
    if parts:
        units = [
            (name, state)
            for name, (_, state) in zip(names_of_parts(units), units, strict=True)
        ]
    names = {id(state): name for name, state in units}
    # Most units are alike: their plans share the objects with these identities.
    parameters: dict[int, tuple[ParameterFacts, ...]] = {}
    options: dict[tuple[object, ...], Options] = {}
    found = []
    for name, state in units:
        regions = state.handle.layout.plan.regions
        several = len(state.modules) > 1
        # Units of several modules may share a plan; their paths differ.
        # Nor do parts of parameters, whose forms belong to the unit.
        key = id(state.handle) if several or parts else id(regions)
        if key not in parameters:
            found_here = _parameter_facts(state.handle, several=several)
            parameters[key] = _of_all_parts(state, found_here) if parts else found_here
        settings = _facts_of_settings(state, names)
        setting = id(state.options), *settings
        if setting not in options:
            pairs = zip(_SETTINGS, map(str, settings), strict=True)
            options[setting] = (*_option_facts(state.options), *pairs)
        found.append(
            UnitFacts(
                name,
                parameters[key],
                options[setting],
                () if parts else tuple(buffers.get(id(state), ())),
                several,
            )
        )
    # Their names and parameters are other ones on each rank; only the number tells
    # whether all ranks meet as often.
    if experts and found:
        told = ("units with an expert_mesh", str(experts))
        found[0] = found[0]._replace(options=(*found[0].options, told))
    return tuple(found)


def names_of_parts(units: Sequence[tuple[str, _FSDPState]]) -> list[str]:
    """Return names of ``units`` that are equal on ranks with other experts, too."""
    # Experts have the numbers of the rank in their names.
    return [
        f"number {n} with an expert_mesh" if state.handle.groups.experts_ref else name
        for n, (name, state) in enumerate(units, 1)
    ]


def _of_all_parts(
    state: _FSDPState, parameters: Sequence[ParameterFacts]
) -> tuple[ParameterFacts, ...]:
    """Return the facts of ``parameters`` that are equal on the ranks of other parts."""
    if state.handle.groups.experts_ref is not None:
        return ()  # each rank has experts of its own
    forms, found = state.handle.layout.forms, []
    for index, (names, shape, dtype, trains, _) in enumerate(parameters):
        # Regions hold what a rank has, and parts differ in size.
        place = (0, 0)
        found.append((names, forms[index].whole_shape(shape), dtype, trains, place))
    return tuple(found)


def digest_of(facts: Sequence[UnitFacts]) -> bytes:
    """Return 16 bytes that are equal for equal facts, on every rank."""
    # ``repr`` of the parts that units share is computed once. Equal texts have the same
    # number: whether units share a part is no fact.
    numbers: dict[str, int] = {}
    known: dict[int, int] = {}
    rows = []
    for name, parameters, options, buffers, _ in facts:
        for part in (parameters, options):
            if id(part) not in known:
                known[id(part)] = numbers.setdefault(repr(part), len(numbers))
        rows.append((name, known[id(parameters)], known[id(options)], buffers))
    text = repr((rows, list(numbers)))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def buffer_names(top: _FSDPState) -> dict[int, list[str]]:
    """Return the names of buffers below ``top``, by identity of the unit's state."""
    found: dict[int, list[str]] = {}
    for module in top.modules:
        # Most models have no buffers, and need no names.
        if not any(each._buffers for each in modules(module)):
            continue
        for name, each in named(module):
            if each._buffers:
                owner = OWNERS.get(each)
                if owner is not None:
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
            (number, slot.offset, *(slot.strides or ())),
        )
        for number, region in enumerate(handle.layout.plan.regions)
        for slot in region.parameters
    }
    return tuple([found[index] for index in sorted(found)])


def _option_facts(options: UnitOptions) -> Options:
    """Return the options that have an effect."""
    found = in_force(options)
    del found["mixed_precision"], found["forward_prefetch"]  # told in detail elsewhere
    found.update(
        (f"mixed_precision.{name}", value)
        for name, value in precision_fields(options).items()
    )
    return tuple((name, option_text(value)) for name, value in found.items())


_SETTINGS = (
    "ranks per shard group",
    "number of replicas",
    "device type",
    "reduction of gradients in backward",
    *COMPARED_LATER,
)
"""What ``_facts_of_settings`` returns."""


def _facts_of_settings(
    state: _FSDPState, names: Mapping[int, str]
) -> tuple[object, ...]:
    """Return the ranks, and the settings that can be changed after ``fully_shard``."""
    handle = state.handle
    return (
        # Numbers of ranks and not the ranks, which differ between replicas.
        handle.groups.shard_world_size,
        handle.groups.replicas,
        handle.layout.device.type,
        # A backward compares this setting by itself, because ``no_sync`` changes often.
        state.settings.sync_gradients,
        *setting_values(state, names),
    )


def first_difference(facts: Mapping[int, Sequence[UnitFacts]]) -> Difference | None:
    """Return the first difference between the facts of ranks; None if there is none.

    Returns: the difference; names of units come before the facts of the units.
    """
    entries = {rank: _entries(units) for rank, units in facts.items()}
    for key in sorted(set().union(*entries.values())):
        found = {rank: each.get(key) for rank, each in entries.items()}
        if len({None if each is None else each[1] for each in found.values()}) > 1:
            what = next(each[0] for each in found.values() if each is not None)
            return Difference(
                what + _missing_names(key, found, facts),
                {r: "nothing" if e is None else e[1] for r, e in found.items()},
            )
    return None


_Key = tuple[int, int, int, int]
"""Order of comparison: names of units or facts of units, unit, kind of fact, index."""
_NAMES, _SHAPE, _DTYPE, _FLAG, _OPTION, _PLACE, _BUFFER = range(7)
"""Kinds of facts."""


def _entries(units: Sequence[UnitFacts]) -> dict[_Key, tuple[str, str]]:
    """Return each fact as its description and its value, both in words."""
    found: dict[_Key, tuple[str, str]] = {}
    for k, unit in enumerate(units):
        # Names of units come before all else: a module that is a unit on some ranks
        # only would be told as parameters that are missing in the unit above.
        at = f"of unit {quoted(unit.name)}"
        found[0, k, 0, 0] = f"unit number {k + 1} of the model", quoted(unit.name)
        for j, (names, shape, dtype, trainable, place) in enumerate(unit.parameters):
            full = unit.paths(names)
            this = f"of parameter {quoted(full[0])}"
            tied = f" (tied to {', '.join(map(quoted, full[1:]))})" if full[1:] else ""
            found[1, k, _NAMES, j] = f"parameter {j + 1} {at}", quoted(full[0]) + tied
            found[1, k, _SHAPE, j] = f"the shape {this}", str(tuple(shape))
            found[1, k, _DTYPE, j] = f"the dtype {this}", dtype
            found[1, k, _FLAG, j] = f"requires_grad {this}", str(trainable)
            found[1, k, _PLACE, j] = (
                f"the flat buffer {this} (group_by)",
                f"number {place[0] + 1} from element {place[1]}"
                # Without strides the parameter is contiguous where modules compute.
                + (f", strides {place[2:]}" if place[2:] else ""),
            )
        for j, (name, value) in enumerate(unit.options):
            found[1, k, _OPTION, j] = f"the option {name} {at}", value
        # Buffers last: no collective of the step sends them.
        for j, name in enumerate(unit.buffers):
            found[1, k, _BUFFER, j] = f"buffer {j + 1} {at}", quoted(name)
    return found


def _missing_names(
    key: _Key,
    found: Mapping[int, tuple[str, str] | None],
    facts: Mapping[int, Sequence[UnitFacts]],
) -> str:
    """Return which names of a difference in names other ranks do not have at all."""
    is_unit = key[0] == 0
    if not is_unit and key[2] != _NAMES:
        return ""
    kind = "unit" if is_unit else "parameter"
    has = {rank: _names_in(units, is_unit) for rank, units in facts.items()}
    said = []
    for name in dict.fromkeys(e[1].partition(" (tied")[0] for e in found.values() if e):
        without = [rank for rank, names in has.items() if name not in names]
        if without:
            said.append(f"{ranks_text(without)} without a {kind} {name}")
    return f" ({'; '.join(said)})" if said else ""


def _names_in(units: Iterable[UnitFacts], is_unit: bool) -> set[str]:
    """Return the quoted names of all units, or of all parameters."""
    if is_unit:
        return {quoted(unit.name) for unit in units}
    return {
        quoted(path)
        for unit in units
        for names, *_ in unit.parameters
        for path in unit.paths(names)
    }
