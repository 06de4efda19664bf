"""The least that fully sharded training must do, as a yardstick: no overlap, no checks.

One flat shard per unit is its only parameter. Forward gathers it into one storage and
shows views of that to the modules; the hook of an autograd node gathers again for
backward, and the node's backward concatenates what arrived, once, and reduces it::

    forward   gather k | compute k | free k
    backward  gather k | compute k | free k | cat | reduce-scatter k

No stream, no prefetch, no state dict, no mixed trees: what a library adds to this is
its own doing, in memory as in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class FloorUnit:
    """The parameters of ``module`` that no unit below it has, as one flat shard."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[tuple[nn.Module, str]],
        compute: torch.dtype,
        reduce: torch.dtype,
        *,
        is_root: bool,
    ) -> None:
        self.is_root = is_root
        self.places = list(parameters)
        self.reduce = reduce
        world, rank = dist.get_world_size(), dist.get_rank()
        held = [getattr(owner, key).detach() for owner, key in self.places]
        flat = torch.cat([parameter.reshape(-1) for parameter in held])
        self.numel = flat.numel()
        # Shards start at 16 bytes, as those of the libraries do.
        size = -(-self.numel // (8 * world)) * 8
        padded = torch.zeros(size * world, dtype=flat.dtype)
        padded[: self.numel].copy_(flat)
        own = padded[rank * size : (rank + 1) * size].clone()
        self.shard = nn.Parameter(own)
        self.full = torch.empty(size * world, dtype=compute)
        shapes = [parameter.shape for parameter in held]
        sizes = [shape.numel() for shape in shapes]
        pieces = self.full[: self.numel].split_with_sizes(sizes)
        self.views = [p.view(s).data for p, s in zip(pieces, shapes, strict=True)]
        self.own = self.full[rank * size : (rank + 1) * size]
        self.free()
        for owner, key in self.places:
            del owner._parameters[key]
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)
        module.register_parameter("flat", self.shard)

    def gather(self) -> None:
        """Make ``full`` whole, unless it is."""
        storage = self.full.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.full.numel() * self.full.itemsize)
            if self.own.dtype == self.shard.dtype:
                _all_gather(self.full, self.shard.data)
            else:
                self.own.copy_(self.shard.data)
                _all_gather(self.full, self.own)

    def free(self) -> None:
        """Give the memory of ``full`` back."""
        self.full.untyped_storage().resize_(0)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Gather, and show the modules what to compute with."""
        self.gather()
        shown = _show(self.shard, self)
        for (owner, key), view in zip(self.places, shown, strict=True):
            owner.__dict__[key] = view

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Free, and gather again when the output's gradient is there."""
        for owner, key in self.places:
            del owner.__dict__[key]
        if not self.is_root:
            self.free()
        if output.grad_fn is not None:
            node: Any = output.grad_fn
            node.register_prehook(lambda gradients: self.gather())


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, unit: FloorUnit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return tuple(view.data for view in unit.views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        unit: FloorUnit = ctx.unit
        unit.free()
        whole = torch.empty(unit.full.numel(), dtype=unit.reduce)
        whole[unit.numel :].zero_()
        torch.cat([g.reshape(-1) for g in gradients], out=whole[: unit.numel])
        part = torch.empty(unit.shard.numel(), dtype=unit.reduce)
        _reduce_scatter(part, whole)
        return part.div_(dist.get_world_size()), None


_show: Callable[[Tensor, FloorUnit], tuple[Tensor, ...]] = _Shown.apply


def floor_shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> None:
    """Make one unit of each of ``units``, and one of what is left of ``model``."""
    for unit in (*units, model):
        places = [
            (module, key)
            for module in unit.modules()
            for key, parameter in module._parameters.items()
            if key != "flat" and parameter is not None
        ]
        FloorUnit(unit, places, compute, reduce, is_root=unit is model)
