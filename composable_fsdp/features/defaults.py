"""The features that every program gets, whatever it imports of the package.

Nothing registers itself when its module is imported: a program that imports
``fully_shard`` alone would then miss what it has not imported.
"""

from __future__ import annotations

from composable_fsdp.features.audit.first_step import (
    around_hook,
    begin_audit,
    note_step,
)
from composable_fsdp.flat.user_hooks import HOOK_WATCHES
from composable_fsdp.optim.step_hooks import FIRST_STEPS, install_step_hooks
from composable_fsdp.tree.after_sharding import call_after_sharding
from composable_fsdp.tree.state import FIRST_FORWARDS


def install() -> None:
    """Install the features; a second call does nothing."""
    if begin_audit not in FIRST_FORWARDS:
        call_after_sharding(install_step_hooks)
        FIRST_FORWARDS.append(begin_audit)
        FIRST_STEPS.append(note_step)
        HOOK_WATCHES.append(around_hook)
