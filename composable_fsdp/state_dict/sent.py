"""Send values between ranks: descriptions as objects, elements by broadcasts."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from composable_fsdp.access.other_parts import Route
from composable_fsdp.comm import collectives
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat import memory
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState


# A leaf of a tree of values, which a named tuple would not be.
@dataclass(frozen=True, slots=True)
class Described:
    """A tensor without its elements, as ranks tell each other of it."""

    shape: torch.Size
    dtype: torch.dtype
    part: bool
    """Whether the tensor is a sharded value, which holds only a part."""


def described(value: Any) -> Any:
    """Return a ``Described`` for a tensor with dimensions; other values travel."""
    if not isinstance(value, Tensor):
        return value
    part = isinstance(value, ShardedValue)
    if value.ndim or part:
        return Described(value.shape, value.dtype, part)
    # On the CPU: a pickled CUDA tensor would be restored on the sender's device.
    return value.cpu()


def send(
    value: Tensor | Described,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    *,
    rank: int = 0,
) -> Tensor:
    """Return the tensor of ``rank`` everywhere. Collective: a broadcast per group."""
    if isinstance(value, Tensor):
        whole = value.detach().to(device).contiguous()
    else:
        flat = memory.new_buffer(value.shape.numel(), value.dtype, device)
        whole = flat.view(value.shape)
    for group in groups:
        collectives.broadcast(whole, group, rank=rank)
    return whole


def routes_of(
    units: Sequence[_FSDPState], group: dist.ProcessGroup | None
) -> tuple[Route, Route]:
    """Return the groups over which, in turn, all ranks exchange, and those of a send.

    A tensor goes along the replicate group of shard rank 0, and then from there over
    each shard group.
    """
    if group is not None:
        return (group,), (group,)
    if not units:
        return (), ()
    shard, replicate = units[0].ranks.shard, units[0].ranks.replicate
    copies = replicate if shard.rank() == 0 else None
    both, sends = (
        tuple(g for g in each if g is not None and g.size() > 1)
        for each in ((shard, replicate), (copies, shard))
    )
    return both, sends


def share_structure(saved: Any, groups: Route) -> Any:
    """Return the first rank's ``saved``; other ranks get bytes for ``unpacked``.

    Collective: one broadcast of an object per group.
    Raises: CheckpointError on all ranks, if the structure cannot be pickled.
    """
    is_first = all(group.rank() == 0 for group in groups)
    # One object, so that all ranks refuse alike before the first tensor is sent.
    told: Any = None
    if groups and is_first:
        try:
            told = pickle.dumps(_pytree.tree_map(described, saved))
        except Exception as error:
            # Not raised: the other ranks wait for the broadcast.
            told = (
                "The optimizer state of the first rank cannot be sent to the others: "
                f"{type(error).__name__}: {error}. A state holds tensors, numbers, "
                "strings, lists and dicts; leave out what is none of them."
            )
    for group in groups:
        told = collectives.broadcast_object(told, group)
    # The error text of the first rank.
    if isinstance(told, str):
        raise CheckpointError(told)
    return saved if is_first else told


def unpacked(shared: Any) -> Any:
    """Return the structure, with a ``Described`` for each tensor with dimensions."""
    return pickle.loads(shared) if isinstance(shared, bytes) else shared
