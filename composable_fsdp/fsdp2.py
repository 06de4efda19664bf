"""The names of torch's FSDP2, for scripts that change their import line."""

from composable_fsdp.access.manual import UnshardHandle
from composable_fsdp.doors.fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from composable_fsdp.doors.fsdp2_module import FSDPModule

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
