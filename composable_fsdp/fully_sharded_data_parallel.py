"""The wrapper, under torch FSDP1's module path ``fsdp.fully_sharded_data_parallel``."""

from composable_fsdp.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.entries.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ShardingStrategy",
]
