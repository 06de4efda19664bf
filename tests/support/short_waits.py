"""Waits of the package, shortened for ranks that are about to wait in vain.

What a rank is told after a long wait does not depend on what counts as long. The
default lengths are measured by ``tests/faults/test_verdicts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from composable_fsdp.comm import watch
from composable_fsdp.optim import clip_check, step_checks

LONG = 0.4
"""Seconds of a wait after which a rank tells its position, as ``watch.SLOW``."""


def shorten_waits() -> None:
    """Let the watch of this process look five times a second, to the process's end."""
    watch.TICK, watch.SLOW = 0.2, LONG


@contextmanager
def step_alone() -> Iterator[None]:
    """Let a step of an optimizer that no other rank takes wait for nobody."""
    with (
        mock.patch.object(clip_check, "_PATIENCE", 0.1),
        mock.patch.object(step_checks, "_PATIENCE", 0.1),
    ):
        yield
