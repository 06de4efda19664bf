"""Broadcast optimizer state from the first rank to all ranks, tensor by tensor."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from composable_fsdp.comm import collectives
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat import memory
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState

Route = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True, slots=True)
class Described:
    """Placeholder for a tensor that only the first rank holds."""

    shape: torch.Size
    dtype: torch.dtype
    part: bool
    """Whether the tensor is a sharded value, which holds only a part."""


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

    One object, so that all ranks refuse alike before the first tensor is sent.

    Collective: one broadcast of an object per group.
    Raises: CheckpointError on all ranks, if the structure cannot be pickled.
    """
    is_first = all(group.rank() == 0 for group in groups)
    if not groups:
        return saved
    told: Any = _packed(saved) if is_first else None
    for group in groups:
        told = collectives.broadcast_object(told, group)
    # The error text of the first rank.
    if isinstance(told, str):
        raise CheckpointError(told)
    return saved if is_first else told


def unpacked(shared: Any) -> Any:
    """Return the structure, with a ``Described`` for each tensor with dimensions."""
    return pickle.loads(shared) if isinstance(shared, bytes) else shared


def _packed(saved: Any) -> bytes | str:
    """Return the structure as bytes, or a string that says why pickling failed."""
    try:
        return pickle.dumps(_pytree.tree_map(_describe, saved))
    except Exception as error:
        # Not raised: the other ranks wait for the broadcast.
        return (
            "The optimizer state of the first rank cannot be sent to the others: "
            f"{_unsent(saved)} ({type(error).__name__}: {error}). A state holds "
            "tensors, numbers, strings, lists and dicts; leave it out."
        )


def _unsent(saved: Any) -> str:
    """Return path and type of the first value that does not pickle."""
    for path, value in _pytree.tree_leaves_with_path(saved):
        try:
            pickle.dumps(_describe(value))
        except Exception:
            return f"{_pytree.keystr(path)} is a {type(value).__name__}"
    return "its keys do not pickle"


def _describe(value: Any) -> Any:
    """Replace a tensor with dimensions or a sharded value by a ``Described``."""
    if not isinstance(value, Tensor):
        return value
    part = isinstance(value, ShardedValue)
    if value.ndim or part:
        return Described(value.shape, value.dtype, part)
    # On the CPU: a pickled CUDA tensor would be restored on the sender's device.
    return value.cpu()


def share_tensor(
    value: Tensor | Described,
    groups: Route,
    device: torch.device,
) -> Tensor:
    """Return the first rank's tensor on every rank, on ``device``.

    Collective: one broadcast per group; all its ranks must call.
    """
    if isinstance(value, Tensor):
        whole = value.detach().to(device).contiguous()
    else:
        flat = memory.new_buffer(value.shape.numel(), value.dtype, device)
        whole = flat.view(value.shape)
    for group in groups:
        collectives.broadcast(whole, group)
    return whole
