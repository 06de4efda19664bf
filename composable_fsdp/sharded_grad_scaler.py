"""The gradient scaler, under torch FSDP1's module path ``fsdp.sharded_grad_scaler``."""

from composable_fsdp.features.grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
