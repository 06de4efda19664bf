"""The features that every program gets, whatever it imports of the package.

The only module that registers anything when it is imported, and the package imports it:
a program that imports ``fully_shard`` alone would else miss what it has not imported.
"""

from __future__ import annotations

from composable_fsdp.features.audit.first_step import (
    around_hook,
    begin_audit,
    note_step,
)
from composable_fsdp.flat.user_hooks import HOOK_WATCHES
from composable_fsdp.optim.step_hooks import FIRST_STEPS, install_step_hooks
from composable_fsdp.tree.after_sharding import FIRST_FORWARDS, call_after_sharding

call_after_sharding(install_step_hooks)
FIRST_FORWARDS.append(begin_audit)
FIRST_STEPS.append(note_step)
HOOK_WATCHES.append(around_hook)
