"""Waits of the package, shortened for ranks that are about to wait in vain.

What a rank is told after a long wait does not depend on what counts as long. The
default lengths are measured by ``tests/faults/test_verdicts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

from composable_fsdp.comm import agreement, sequence, watch
from composable_fsdp.optim import step_checks

LONG = 0.4
"""Seconds of a wait after which a rank tells its position, as ``watch.SLOW``."""
OFTEN = 0.2
"""Seconds between two looks of the watch, or two questions of a rank that waits."""


def shorten_waits() -> None:
    """Let this process look for a verdict five times a second, to the process's end.

    Call this before the first collective: a group keeps the patience of its first.
    """
    watch.TICK, watch.SLOW = OFTEN, LONG
    sequence.PATIENCE = timedelta(seconds=LONG)
    mock.patch.object(
        agreement, "seconds_between_questions", return_value=OFTEN
    ).start()


@contextmanager
def step_alone() -> Iterator[None]:
    """Let a step of an optimizer that no other rank takes wait for nobody."""
    with mock.patch.object(step_checks, "_PATIENCE", 0.1):
        yield
