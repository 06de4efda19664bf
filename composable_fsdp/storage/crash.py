"""Points of a save at which a test can kill the process, by an environment variable.

``COMPOSABLE_FSDP_CRASH_AT=mid-file`` kills every rank that reaches the point, as a
power failure would; ``mid-file:1`` kills only rank 1 of the save.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "COMPOSABLE_FSDP_CRASH_AT"
POINTS = ("before-write", "mid-file", "after-write", "before-rename", "after-rename")


def crash_point(point: str, rank: int) -> None:
    """Kill the process if the variable names this point (and this rank)."""
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return
    # ``point`` or ``point:rank``.
    wanted, _, which = asked.partition(":")
    if wanted == point and which in ("", str(rank)):
        # SIGKILL and not an exception: no handler runs and no buffer is flushed.
        os.kill(os.getpid(), signal.SIGKILL)
