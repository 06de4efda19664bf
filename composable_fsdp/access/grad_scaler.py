"""A gradient scaler that decides alike on all ranks.

A rank sees the gradients of its shards alone. One that found an infinity would skip the
step and lower its scale, while the others step: so what was found is reduced before
anybody decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.flat.flat_parameter import flats_in, move_own_gradients
from composable_fsdp.flat.grad_samples import sample_again


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded gradients; arguments are those of FSDP1's.

    ``process_group``: the ranks that decide together; all, if it is None. Gradients may
    be on the CPU and in half precision, as CPU offload and low-precision reduction
    leave them.

    Collective: one all-reduce of one number per optimizer and step, in ``unscale_`` or
    else in ``step``.

    >>> scaler = ShardedGradScaler(device=loss.device.type)
    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale; a tensor, or any nesting of iterables of tensors.

        The result has the dtype of ``outputs``, also for a loss in half precision.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)([self.scale(each) for each in outputs])
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise TypeError(
            "ShardedGradScaler.scale expects a tensor or an iterable of tensors, got "
            f"{type(outputs).__name__}."
        )

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients, and say per device whether any rank found an infinity.

        The base class calls it once per optimizer and step, whatever came first.
        """
        move_own_gradients(flats_in(optimizer.param_groups))
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        sample_again()
        # Without a gradient on this rank the base class has looked at no device.
        found = found or {found_inf.device: found_inf}
        group = self.process_group or dist.group.WORLD
        if group is not None and group.size() > 1:
            together = torch.stack(
                [flag.to(found_inf.device) for flag in found.values()]
            )
            any_found = together.amax()
            collectives.all_reduce(any_found, group, maximum=True)
            for flag in found.values():
                flag.copy_(any_found)
        return found
