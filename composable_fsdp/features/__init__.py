"""Hooks, wires, flat parameters and records: what a program switches on."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import public_names

if TYPE_CHECKING:
    from composable_fsdp.access.settings import register_comm_hook as register_comm_hook
    from composable_fsdp.comm.operations import OperationRecord as OperationRecord
    from composable_fsdp.comm.operations import recent_operations as recent_operations
    from composable_fsdp.comm.wire_format import WireFormat as WireFormat
    from composable_fsdp.comm.wire_format import WireLayout as WireLayout
    from composable_fsdp.config import Arena as Arena
    from composable_fsdp.features.captured_step import CapturedStep as CapturedStep
    from composable_fsdp.features.captured_step import capture as capture
    from composable_fsdp.features.comm_hooks import DefaultState as DefaultState
    from composable_fsdp.features.comm_hooks import (
        LowPrecisionState as LowPrecisionState,
    )
    from composable_fsdp.features.comm_hooks import ReplicaState as ReplicaState
    from composable_fsdp.features.comm_hooks import (
        allreduce_hook as allreduce_hook,
    )
    from composable_fsdp.features.comm_hooks import (
        bf16_compress_hook as bf16_compress_hook,
    )
    from composable_fsdp.features.comm_hooks import (
        fp16_compress_hook as fp16_compress_hook,
    )
    from composable_fsdp.features.comm_hooks import (
        int8_all_to_all_hook as int8_all_to_all_hook,
    )
    from composable_fsdp.features.comm_hooks import (
        reduce_scatter_hook as reduce_scatter_hook,
    )
    from composable_fsdp.features.comm_hooks import replica_hook as replica_hook
    from composable_fsdp.features.flat_params import flat_parameters as flat_parameters
    from composable_fsdp.features.host_memory.copies import (
        offload_states as offload_states,
    )
    from composable_fsdp.features.host_memory.sleeping import released as released
    from composable_fsdp.features.host_memory.sleeping import sleep as sleep
    from composable_fsdp.features.host_memory.sleeping import wake as wake
    from composable_fsdp.features.nonfinite import NonFinite as NonFinite
    from composable_fsdp.features.nonfinite import find_nonfinite as find_nonfinite
    from composable_fsdp.features.owners import map_on_owners as map_on_owners
    from composable_fsdp.features.replicas import (
        load_replica_state_dict as load_replica_state_dict,
    )
    from composable_fsdp.features.replicas import (
        replica_state_dict as replica_state_dict,
    )
    from composable_fsdp.features.training.even_batches import (
        even_batches as even_batches,
    )
    from composable_fsdp.features.training.step_log import StepLog as StepLog
    from composable_fsdp.features.unused_units import call_where as call_where
    from composable_fsdp.features.wires import Float8Wire as Float8Wire
    from composable_fsdp.features.wires import Int8Wire as Int8Wire

__all__ = public_names(__name__)
