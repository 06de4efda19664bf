"""Parameters frozen, and settings changed, after ranks have compared their models.

Changed settings join the mode of a forward, which the order logs compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import slot_path
from composable_fsdp.naming import listed, quoted
from composable_fsdp.tree.moments import CHANGED
from composable_fsdp.tree.state import _FSDPState

_before: WeakKeyDictionary[_FSDPState, dict[str, object]] = WeakKeyDictionary()
"""The settings of each unit before the first change."""


def note_change(states: Iterable[_FSDPState]) -> None:
    """Note that settings of units are about to change."""
    for state in states:
        # Before the first forward ranks will compare the new values.
        if state.context is not None:
            CHANGED.add(state.context)
            if state not in _before:
                _before[state] = setting_values(state)


def changed_settings(states: Iterable[_FSDPState]) -> Iterator[tuple[str, bool | None]]:
    """Yield the settings of ``states`` that differ from those before their changes."""
    for state in states:
        if (before := _before.get(state)) is None:
            continue
        for name, now in setting_values(state).items():
            if before[name] != now:
                text = f"{name}={now} of {quoted(state.fqn)}"
                yield text, None


def changed_flags(handle: FlatParamHandle) -> Iterator[tuple[str, bool | None]]:
    """Yield the parameters frozen or unfrozen since ``fully_shard``."""
    layout = handle.layout
    # 0: the unit was never rebuilt, as most units.
    if not layout.structure:
        return
    trains = {
        slot.index: region.layout.trainable
        for region in layout.regions
        for slot in region.layout.parameters
    }
    for region in layout.origin:
        for slot in region.parameters:
            if trains[slot.index] is not region.trainable:
                yield slot_path(handle, slot), trains[slot.index]


def setting_values(
    state: _FSDPState, names: Mapping[int, str] = MappingProxyType({})
) -> dict[str, object]:
    """Return the compared settings of a unit, by the names that errors tell."""
    settings, rule = state.settings, state.handle.rule
    reshards = settings.reshard_after_forward
    if reshards is None:  # as lazy initialization will choose
        reshards = state.parent is not None

    def told(units: Sequence[_FSDPState]) -> str:
        if not units:
            return ""
        return listed(quoted(names.get(id(each), each.fqn)) for each in units)

    return {
        "reshard_after_forward": reshards,
        "reshard_after_backward": settings.reshard_after_backward,
        "forward_prefetch": settings.prefetches_forward,
        "units to prefetch in forward": told(state.ahead_in_forward),
        "units to prefetch in backward": told(state.ahead_in_backward),
        "gradient divide factor": rule.factor,
        # Without sums over ranks the setting has no effect.
        "all-reduce of gradients over replicas": rule.all_reduce
        or state.handle.groups.sum_ref is None,
        "reduction of unused parameters": rule.fill,
        "communication hook": _name(rule.hook),
        "state of the communication hook": _hook_state(rule.hook_state),
        "all-reduce hook": _name(rule.after_sum),
        "sums without averaging": rule.force_sum,
        "separate group of reduce-scatters": rule.group is not None,
    }


def _name(function: object) -> str | None:
    """Return the name of a function or of its class; None for None."""
    if function is None:
        return None
    # Names and not the functions, which are other objects on each rank.
    if isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _hook_state(state: object) -> str | None:
    """Return the class of a hook's state, and the factors by which a hook divides."""
    if state is None:
        return None
    # The attributes of this package's and torch's states, and no other: a state of the
    # user may hold the rank.
    factors = ("gradient_predivide_factor", "gradient_postdivide_factor")
    known = (*factors, "parameter_type")
    held = {n: getattr(state, n) for n in known if hasattr(state, n)}
    return f"{type(state).__qualname__}({named_values(held)})"


def named_values(values: Mapping[str, object]) -> str:
    """Return names and values in words."""
    return ", ".join(f"{name}={option_text(value)}" for name, value in values.items())


def option_text(value: object) -> str:
    """Return a value of an option in words that are equal on all ranks."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    # The text of ``object`` is an address: equal in forked ranks, whatever the values,
    # and different in ranks of torchrun.
    if type(value).__repr__ is object.__repr__:
        held = named_values(getattr(value, "__dict__", {}))
        return f"{type(value).__qualname__}({held})"
    return str(value)
