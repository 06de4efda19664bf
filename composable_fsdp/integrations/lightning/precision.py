"""The meaning of ``precision=`` of the Trainer and of Fabric for a sharded model."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch.plugins.precision as trainer
import torch
from torch.optim import Optimizer

from composable_fsdp.access.grads import clip_grad_norm_
from composable_fsdp.config import MixedPrecision
from composable_fsdp.errors import CompositionError
from composable_fsdp.features.grad_scaler import ShardedGradScaler


class ShardedPrecision(trainer.Precision):
    """Lightning's precision plugin for ``32-true``, with clipping over all ranks.

    Derive your own precision plugin from this class to use the plugin with
    ``ComposableFSDPStrategy``.
    """

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the optimizer's gradients to a norm over all ranks of ``clip_val``."""
        # Lightning's own method would clip by the norm of this rank's shards.
        clip_grad_norm_(self.main_params(optimizer), float(clip_val))


def for_shards(plugin: Any, lightnings: Any) -> Any:
    """Return a plugin of the module ``lightnings``, changed for shards, or raise."""
    if plugin is None or isinstance(plugin, ShardedPrecision):
        return plugin
    names = ("Precision", "HalfPrecision", "DoublePrecision", "MixedPrecision")
    # By exact class: a subclass may do anything with whole parameters.
    if type(plugin) not in [getattr(lightnings, name) for name in names]:
        raise CompositionError(
            f"The precision plugin {type(plugin).__name__} was given to a strategy of "
            "composable_fsdp, which does not know what it does with whole parameters. "
            "Pass precision= one of 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true "
            "and 64-true, or mixed_precision=MixedPrecision(...) to the strategy; or "
            "derive a plugin of the Trainer from "
            "composable_fsdp.lightning.ShardedPrecision."
        )
    # On the object: a class of our own would file the scaler's state under its name,
    # where a Trainer without this strategy does not look. Fabric clips elsewhere.
    if lightnings is trainer:
        plugin.clip_grad_by_norm = partial(ShardedPrecision.clip_grad_by_norm, plugin)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, ShardedGradScaler):
        # Settings of a scaler that the user has configured are kept.
        plugin.scaler = ShardedGradScaler(
            plugin.device,
            init_scale=scaler.get_scale(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_factor=scaler.get_growth_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
    return plugin


def mixed_precision(plugin: Any) -> MixedPrecision | None:
    """Return the dtypes of units under ``plugin``; None: those of the parameters."""
    # In half precision throughout (bf16-true), units have nothing to convert.
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    dtype = dtypes.get(getattr(plugin, "precision", ""))
    if dtype is None:
        return None
    # Sums over many ranks lose too much in half precision, and overflow in float16.
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
