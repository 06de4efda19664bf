"""The features that every program gets, whatever it imports of the package.

The only module that registers anything when it is imported, and the package imports it:
a program that imports ``fully_shard`` alone would else miss what it has not imported.
"""

from __future__ import annotations

from torch.serialization import add_safe_globals

from composable_fsdp.features.audit.first_step import (
    around_hook,
    begin_audit,
    note_step,
)
from composable_fsdp.features.foreign_strategies import guard_strategies
from composable_fsdp.flat.user_hooks import HOOK_WATCHES
from composable_fsdp.optim.state_dict_hooks import prepare_for_dcp
from composable_fsdp.optim.step_hooks import FIRST_STEPS, install_step_hooks
from composable_fsdp.state_dict.dcp_caller import call_before_optimizer
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.after_sharding import FIRST_FORWARDS, call_after_sharding

call_after_sharding(install_step_hooks)
call_after_sharding(guard_strategies)
FIRST_FORWARDS.append(begin_audit)
FIRST_STEPS.append(note_step)
HOOK_WATCHES.append(around_hook)
call_before_optimizer(prepare_for_dcp)
# Construction only makes a tensor, so ``torch.load(weights_only=True)`` may do so.
add_safe_globals([ShardedValue])
