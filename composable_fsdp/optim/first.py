"""Giving every rank what only the first one holds, one tensor at a time.

The structure goes first, as one object, so that all ranks check the same names and
shapes and raise alike; then each tensor is sent when its turn comes, and cut at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from composable_fsdp.comm import collectives
from composable_fsdp.flat import storage
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.traversal import _get_fsdp_states


@dataclass(frozen=True, slots=True)
class Described:
    """Stands for a tensor that another rank holds."""

    shape: torch.Size
    dtype: torch.dtype
    part: bool
    """Whether it is a sharded value, of which there is nothing to give."""


def hops(
    model: nn.Module, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which this rank takes part, first to last.

    ``group`` if it is given; else first along the replicas of the first shard, then
    within every shard group.
    """
    if group is not None:
        return (group,)
    states = _get_fsdp_states(model)
    if not states:
        return ()
    ranks = states[0].ranks
    copies = ranks.replicate if ranks.shard.rank() == 0 else None
    return tuple(g for g in (copies, ranks.shard) if g is not None and g.size() > 1)


def share_structure(saved: Any, groups: tuple[dist.ProcessGroup, ...]) -> Any:
    """Return the first rank's ``saved``, with tensors in their places or described.

    Numbers and 0-d tensors are there on every rank. On the first rank all tensors are.

    Collective: one broadcast of an object per group.
    """
    structure = saved
    for group in groups:
        if group.rank() == 0:
            collectives.broadcast_object(_pytree.tree_map(_describe, structure), group)
        else:
            structure = collectives.broadcast_object(None, group)
    return structure


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    part = isinstance(value, ShardedValue)
    if value.ndim or part:
        return Described(value.shape, value.dtype, part)
    return value.cpu()


def share_tensor(
    value: Tensor | Described,
    groups: tuple[dist.ProcessGroup, ...],
    device: torch.device,
) -> Tensor:
    """Return the first rank's tensor on every rank, on ``device``.

    Collective: one broadcast per group.
    """
    if isinstance(value, Tensor):
        whole = value.detach().to(device).contiguous()
    else:
        flat = storage.new_buffer(value.shape.numel(), value.dtype, device)
        whole = flat.view(value.shape)
    for group in groups:
        collectives.broadcast(whole, group)
    return whole
