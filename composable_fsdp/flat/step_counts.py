"""Counting writes to shards, and optimizer steps per unit.

A fused optimizer kernel writes parameters without incrementing their version counters.
A unit whose full parameters are kept over a step therefore counts optimizer steps as
well. Counting starts when the first unit is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import attrgetter

from composable_fsdp.flat.handle import FlatParamHandle, UnitLayout

_watching = False
_version = attrgetter("_version")


def written(layout: UnitLayout) -> int:
    """Return a number that grows with every write to a sharded leaf; -1 if on meta."""
    return -1 if layout.on_meta else sum(map(_version, layout.sharded_placed))


def start_counting_steps() -> None:
    """Count optimizer steps from now on."""
    # Without kept units the counts are not needed, and steps skip the counting.
    global _watching
    _watching = True


def is_counting_steps() -> bool:
    """Return whether step counting was started."""
    return _watching


def count_step(handles: Iterable[weakref.ref[FlatParamHandle]]) -> None:
    """Count an optimizer step for each unit in ``handles``."""
    # A dead reference belongs to a model that was deleted.
    for link in handles:
        handle = link()
        if handle is not None:
            handle.writes.steps += 1
