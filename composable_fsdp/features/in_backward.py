"""Optimizers that torch's ``_apply_optimizer_in_backward`` has given to parameters.

Torch steps them in hooks of graph nodes, which no gradient of a sharded parameter
reaches.
"""

from __future__ import annotations

from torch import Tensor

from composable_fsdp.tree.state import RuntimeContext


def step_in_backward(context: RuntimeContext) -> None:
    """Have the shards' gradients step the optimizers that their parameters carry."""
    for handle in context.handles:
        for region in handle.layout.regions:
            for leaf in region.leaves:
                if not hasattr(leaf, "_in_backward_optimizers"):
                    continue
                hooks = leaf._post_accumulate_grad_hooks or {}
                if leaf.requires_grad and _step not in hooks.values():
                    leaf.register_post_accumulate_grad_hook(_step)  # type: ignore[no-untyped-call]  # untyped in torch


def _step(leaf: Tensor) -> None:
    """Step the optimizers of ``leaf``, and clear its gradient."""
    for optimizer in leaf._in_backward_optimizers:  # type: ignore[attr-defined]  # torch sets it
        optimizer.step()
    leaf.grad = None
