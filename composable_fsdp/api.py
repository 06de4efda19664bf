"""Options and enums, under torch FSDP1's module path ``fsdp.api``."""

from composable_fsdp.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

__all__ = ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardingStrategy"]
