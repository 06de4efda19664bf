"""The features that every program gets, whatever it imports of the package.

The only module that registers anything when it is imported: a program that imports
``fully_shard`` alone would else miss what it has not imported.
"""

from __future__ import annotations

from torch.serialization import add_safe_globals

from composable_fsdp.comm import device, meeting, operations
from composable_fsdp.features import engine
from composable_fsdp.features.changes import adopt
from composable_fsdp.features.changes.late_registration import watch_registrations
from composable_fsdp.features.guard.foreign_wrappers import guard_wrappers
from composable_fsdp.features.guard.meetings import meet_in_store
from composable_fsdp.features.guard.progress import note_capture
from composable_fsdp.features.guard.watch import watch
from composable_fsdp.features.passages.casts import keep_full_precision
from composable_fsdp.features.passages.full import FIRST, FULL, MOVING, Searches
from composable_fsdp.features.shown_units import show_units
from composable_fsdp.features.versions import tell_untested
from composable_fsdp.flat.gradients import HOOK_WATCHES
from composable_fsdp.lazy import later
from composable_fsdp.optim.state_dict_hooks import prepare_for_dcp
from composable_fsdp.optim.step_hooks import FIRST_STEPS, install_step_hooks
from composable_fsdp.runtime.recover import GradientOrder
from composable_fsdp.state_dict.dcp_caller import BEFORE_OPTIMIZER
from composable_fsdp.state_dict.hooks import install_state_dict_hooks
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree import moments

operations.RECORDING.append(watch)
meeting.MEETS.append(meet_in_store)
device.CAPTURES.append(note_capture)
moments.UNITS_PLANNED.append(
    later("composable_fsdp.features.parallel.dtensor_form", "refuse_shared_ranks")
)
moments.FORMS_TAKEN.append(
    later("composable_fsdp.features.parallel.dtensor_form", "with_plain_parameters")
)
moments.TREE_FOUND.append(
    later("composable_fsdp.features.parallel.experts", "count_expert_ranks")
)
moments.BEFORE_SYNC.append(
    later("composable_fsdp.features.guard.same_models", "meet_to_sync")
)
moments.UNIT_BUILT.extend((install_state_dict_hooks, show_units))
# These are installed once for the process.
moments.MODULES_SHARDED.extend(
    (
        engine.install,
        install_step_hooks,
        guard_wrappers,
        watch_registrations,
        tell_untested,
    )
)
moments.TREE_INITIALIZED.append(later("composable_fsdp.features.arena", "give_slots"))
moments.MODELS_MEET.append(
    later("composable_fsdp.features.guard.same_models", "compare_models")
)
moments.RANKS_MEET.append(
    later("composable_fsdp.features.guard.order_log", "compare_ranks")
)
moments.FIRST_FORWARD.extend(
    (
        later("composable_fsdp.features.guard.same_weights", "require_initialized"),
        later("composable_fsdp.features.in_backward", "step_in_backward"),
        later("composable_fsdp.features.shown_units", "log_units"),
        later("composable_fsdp.features.audit", "begin_audit"),
    )
)
moments.PASSAGES.update(first=FIRST, full=FULL, moving=MOVING, searches=Searches)
moments.HANDED_OUT.append(
    later("composable_fsdp.features.passages.handed_params", "hand_out")
)
moments.changes = adopt
moments.copy_state = later("composable_fsdp.features.deepcopy", "copy_state")
moments.reduce_by_hook = later("composable_fsdp.features.comm_hooks", "reduce_by_hook")
moments.ORDERS.update(
    {
        False: GradientOrder,
        True: later("composable_fsdp.features.unused_units", "CommonOrder"),
    }
)
moments.KEEPS_PRECISION.append(keep_full_precision)
FIRST_STEPS.extend(
    (
        # The audit's hook after the step removes itself, and must be the last.
        later("composable_fsdp.features.host_memory.copies", "offload_planned"),
        later("composable_fsdp.features.audit", "note_step"),
    )
)
moments.NAME_NONFINITE.append(
    later("composable_fsdp.features.nonfinite", "name_nonfinite")
)
HOOK_WATCHES.append(later("composable_fsdp.features.audit", "around_hook"))
BEFORE_OPTIMIZER.append(prepare_for_dcp)
# Construction only makes a tensor, so ``torch.load(weights_only=True)`` may do so.
add_safe_globals([ShardedValue])
