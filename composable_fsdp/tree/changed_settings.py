"""Settings of units that were changed after ranks have compared their models.

``tree.same_models`` compares settings once. A setting that a rank alone changes later
would move, drop or replace collectives, so changed settings join the mode of a forward,
which the order logs compare::

    set_reshard_after_forward(blocks[1], False)
        note_change      the values before            once per unit
        next forward     "reshard_after_forward=False of 'blocks.1'"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from composable_fsdp.flat.changed_flags import ChangedFlag
from composable_fsdp.naming import quoted
from composable_fsdp.tree.fingerprint import COMPARED_LATER, setting_values
from composable_fsdp.tree.moments import CHANGED
from composable_fsdp.tree.state import _FSDPState

_before: WeakKeyDictionary[_FSDPState, tuple[object, ...]] = WeakKeyDictionary()
"""The settings of each unit before the first change."""


def note_change(states: Iterable[_FSDPState]) -> None:
    """Note that settings of units are about to change."""
    for state in states:
        # Before the first forward ``compare_models`` will compare the new values.
        if state.context is not None:
            CHANGED.add(state.context)
            if state not in _before:
                _before[state] = setting_values(state)


def changed_settings(states: Iterable[_FSDPState]) -> Iterator[ChangedFlag]:
    """Yield the settings of ``states`` that differ from those before their changes."""
    for state in states:
        if (before := _before.get(state)) is None:
            continue
        for name, then, now in zip(
            COMPARED_LATER, before, setting_values(state), strict=True
        ):
            if then != now:
                text = f"{name}={now} of {quoted(state.fqn)}"
                yield ChangedFlag(text, None, state.handle.groups.expert_names)
