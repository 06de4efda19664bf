"""Units over whose leaves optimizers have stepped.

A fused kernel writes parameters without a word to autograd: their versions stay. A unit
whose full parameters are kept over a step therefore counts the steps as well. Nobody
counts before the first unit was kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from composable_fsdp.flat.handle import FlatParamHandle

_watching = False


def start_counting_steps() -> None:
    """Count steps from now on."""
    global _watching
    _watching = True


def is_counting_steps() -> bool:
    """Whether anybody has asked for the steps of a unit."""
    return _watching


def count_step(handles: Iterable[weakref.ref[FlatParamHandle]]) -> None:
    """Count a step over the leaves of each of ``handles``."""
    for link in handles:
        handle = link()
        if handle is not None:
            handle.steps += 1
