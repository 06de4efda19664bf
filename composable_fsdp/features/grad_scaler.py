"""``ShardedGradScaler``: a gradient scaler that decides alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.flat.flat_parameter import flats_in, move_own_gradients
from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.naming import quoted


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded gradients; arguments as in FSDP1.

    Gradients may be in host memory and in half precision.

    Args:
        device: The device type of the scale. Default "cuda".
        init_scale: The first scale. Default 65536.
        backoff_factor: Multiplies the scale after a step with inf or NaN. Default 0.5.
        growth_factor: Multiplies the scale after ``growth_interval`` steps without inf
            or NaN. Default 2.
        growth_interval: The number of these steps. Default 2000.
        enabled: False turns all methods into pass-throughs. Default True.
        process_group: The ranks that decide together. Default None: all ranks.

    Collective: per optimizer and step an all-reduce of one number, in ``unscale_`` or
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
        """Multiply a tensor, or an iterable of tensors, by the scale.

        The result of a tensor has its dtype, also of a loss in half precision.
        """
        scaled = super().scale(outputs)
        # The scale is float32, and promotes a 0-d float16 loss.
        return scaled.to(outputs.dtype) if isinstance(outputs, Tensor) else scaled

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients; return per device whether any rank found an inf."""
        group = self.process_group or dist.group.WORLD
        unscale = partial(
            super()._unscale_grads_, optimizer, inv_scale, found_inf, True
        )
        return unscale_together(optimizer, unscale, found_inf, [group])


def unscale_together(
    optimizer: torch.optim.Optimizer,
    unscale: Callable[[], dict[torch.device, Tensor]],
    found_inf: Tensor,
    groups: Sequence[dist.ProcessGroup | None],
) -> dict[torch.device, Tensor]:
    """Unscale the gradients; return per device whether any rank found an inf.

    Collective: an all-reduce of a number over each of ``groups``.
    """
    # Gradients that the caller set on single parameters of a flat parameter are
    # moved into the flat gradient that the optimizer sees.
    move_own_gradients(flats_in(optimizer.param_groups))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for ref in map(find_param, filter(torch.is_complex, parameters)):
        # torch raises only on a rank that holds elements, and the other ranks would
        # wait in the all-reduce.
        if ref is not None and ref.region.gradient.shown[ref.index]:
            raise TypeError(
                f"ShardedGradScaler got the gradient of parameter {quoted(ref.name)} "
                f"of dtype {ref.leaf.dtype}, and torch unscales real gradients only. "
                "Step complex parameters by an optimizer of their own, unscaled."
            )
    # torch checks only devices that hold a gradient. A rank without a gradient must
    # still take part in the all-reduce.
    found = unscale() or {found_inf.device: found_inf}
    together = [each for each in groups if each is not None and each.size() > 1]
    # A single rank decides for itself.
    if not together:
        return found
    # A rank sees only the gradients of its own shards. If a rank alone found an inf,
    # this rank would skip the step and lower the scale while the others step: reduce
    # the flag before any rank decides.
    flags = [flag.to(found_inf.device) for flag in found.values()]
    any_found = torch.stack(flags).amax()
    # Of several groups, the last may tell of an inf that ranks of the first must know.
    for group in together * min(2, len(together)):
        collectives.all_reduce(any_found, group, maximum=True)
    for flag in found.values():
        flag.copy_(any_found)
    return found
