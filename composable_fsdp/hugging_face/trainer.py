"""The Trainer of transformers and accelerate's Accelerator, sharding the model."""

from composable_fsdp.integrations.hf_accelerate import ShardedAccelerator
from composable_fsdp.integrations.hf_trainer import ShardedTrainer

__all__ = ["ShardedAccelerator", "ShardedTrainer"]
