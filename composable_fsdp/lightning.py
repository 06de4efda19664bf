"""Strategies for Lightning's Trainer and Fabric; the import registers their names."""

from composable_fsdp.integrations.lightning.checkpoints import consolidate
from composable_fsdp.integrations.lightning.fabric import ComposableFSDPFabricStrategy
from composable_fsdp.integrations.lightning.strategy import ShardedPrecision
from composable_fsdp.integrations.lightning.trainer import ComposableFSDPStrategy

__all__ = [
    "ComposableFSDPFabricStrategy",
    "ComposableFSDPStrategy",
    "ShardedPrecision",
    "consolidate",
]
