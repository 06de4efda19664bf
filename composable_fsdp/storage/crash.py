"""Points of a save at which a test can kill the process, by an environment variable.

``COMPOSABLE_FSDP_CRASH_AT=mid-file`` kills every rank that comes there, as a power cut
would; ``mid-file:1`` only rank 1 of the save.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "COMPOSABLE_FSDP_CRASH_AT"
POINTS = ("before-write", "mid-file", "after-write", "before-rename", "after-rename")


def crash_point(point: str, rank: int) -> None:
    """Die if the variable says so: no handler runs, nothing is flushed."""
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return
    wanted, _, which = asked.partition(":")
    if wanted == point and which in ("", str(rank)):
        os.kill(os.getpid(), signal.SIGKILL)
