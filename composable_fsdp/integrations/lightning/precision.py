"""The meaning of ``precision=`` of the Trainer and of Fabric for a sharded model."""

from __future__ import annotations

from typing import Any

import lightning.fabric.plugins.precision as fabric
import lightning.pytorch.plugins.precision as trainer
import torch
from torch.optim import Optimizer

from composable_fsdp.access.grads import clip_grad_norm_
from composable_fsdp.config import MixedPrecision
from composable_fsdp.errors import CompositionError
from composable_fsdp.features.grad_scaler import ShardedGradScaler

_SCALER_KEY = trainer.MixedPrecision.__qualname__
"""Where plain checkpoints hold the state of the scaler."""


class ShardedPrecision(trainer.Precision):
    """Lightning's precision plugin for ``32-true``, with clipping over all ranks.

    Derive your own precision plugin from this class to use the plugin with
    ``ComposableFSDPStrategy``.
    """

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the optimizer's gradients to a norm over all ranks of ``clip_val``."""
        # Lightning's own method would clip by the norm of this rank's shards.
        clip_grad_norm_(self.main_params(optimizer), float(clip_val))


class _Half(ShardedPrecision, trainer.HalfPrecision):
    """``bf16-true`` and ``16-true``."""


class _Double(ShardedPrecision, trainer.DoublePrecision):
    """``64-true``."""


class _Mixed(ShardedPrecision, trainer.MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``; checkpoints are those of Lightning's plugin."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: ``on_save_checkpoint`` writes the scaler's state."""
        # Lightning would file the state under the name of this class, where a Trainer
        # without this strategy does not look.
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the scaler to ``checkpoint``, as Lightning's plugin does."""
        if self.scaler is not None:
            checkpoint[_SCALER_KEY] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the state of the scaler from ``checkpoint``, if any is there."""
        if self.scaler is not None and checkpoint.get(_SCALER_KEY):
            self.scaler.load_state_dict(checkpoint[_SCALER_KEY])


def for_trainer(plugin: Any) -> ShardedPrecision | None:
    """Return the counterpart of ``plugin`` for sharded models, or raise."""
    if plugin is None or isinstance(plugin, ShardedPrecision):
        return plugin
    # By exact class: a subclass may do anything with whole parameters.
    kind = type(plugin)
    if kind is trainer.Precision:
        return ShardedPrecision()
    if kind is trainer.HalfPrecision:
        return _Half(plugin.precision)
    if kind is trainer.DoublePrecision:
        return _Double()
    if kind is trainer.MixedPrecision:
        scaler = _sharded_scaler(plugin.scaler, plugin.device)
        return _Mixed(plugin.precision, plugin.device, scaler)
    raise _refusal(plugin, "derive it from composable_fsdp.lightning.ShardedPrecision")


def for_fabric(plugin: Any) -> Any:
    """Return ``plugin`` with a scaler that decides alike on all ranks, or raise."""
    kinds = (fabric.Precision, fabric.HalfPrecision, fabric.DoublePrecision)
    if plugin is None or type(plugin) in kinds:
        return plugin
    # Fabric clips through the strategy, so only the scaler is replaced.
    if isinstance(plugin, fabric.MixedPrecision):
        plugin.scaler = _sharded_scaler(plugin.scaler, plugin.device)
        return plugin
    raise _refusal(plugin, "leave the plugin away")


def mixed_precision(precision: str) -> MixedPrecision | None:
    """Return the dtypes of units for a value of ``precision=``; None: their own."""
    # In half precision throughout (bf16-true), units have nothing to convert.
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    if precision not in dtypes:
        return None
    # Sums over many ranks lose too much in half precision, and overflow in float16.
    return MixedPrecision(param_dtype=dtypes[precision], reduce_dtype=torch.float32)


def _sharded_scaler(scaler: Any, device: str) -> Any:
    """Return a ``ShardedGradScaler`` with the settings of ``scaler``, or None."""
    if scaler is None or isinstance(scaler, ShardedGradScaler):
        return scaler
    # Settings of a scaler that the user has configured are kept.
    return ShardedGradScaler(
        device,
        init_scale=scaler.get_scale(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_factor=scaler.get_growth_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )


def _refusal(plugin: Any, otherwise: str) -> CompositionError:
    """Return the error for a plugin that computes with whole parameters."""
    return CompositionError(
        f"The precision plugin {type(plugin).__name__} was given to a strategy of "
        "composable_fsdp, which has no counterpart of it for sharded parameters. Pass "
        "precision= one of 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true and "
        f"64-true, or mixed_precision=MixedPrecision(...) to the strategy; or "
        f"{otherwise}."
    )
