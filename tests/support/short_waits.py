"""Waits of the package, shortened for ranks that are about to wait for long.

What a rank is told after a long wait does not depend on what counts as long.
"""

from __future__ import annotations

from datetime import timedelta

from composable_fsdp.comm import groups
from composable_fsdp.features.guard import watch

LONG = 0.4
"""Seconds after which a wait is long, as ``watch.SLOW``."""
OFTEN = 0.2
"""Seconds between two looks of the watch, or two questions of a rank that waits."""


def shorten_waits() -> None:
    """Let this process look at waits five times a second, to the process's end.

    Call this before the first collective: a group keeps the patience of its first.
    """
    watch.TICK, watch.SLOW = OFTEN, LONG
    groups.PATIENCE = timedelta(seconds=LONG)
