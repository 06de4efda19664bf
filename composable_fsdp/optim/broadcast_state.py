"""Giving every rank what only the first one holds, one tensor at a time.

The structure goes first, as one object, so that all ranks check the same names and
shapes and raise alike; then each tensor is sent when its turn comes, and cut at once.
"""

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
    """Stands for a tensor that another rank holds."""

    shape: torch.Size
    dtype: torch.dtype
    part: bool
    """Whether it is a sharded value, of which there is nothing to give."""


def broadcast_groups(
    units: Sequence[_FSDPState], group: dist.ProcessGroup | None
) -> Route:
    """The groups over which this rank takes part, first to last.

    ``group`` if it is given; else first along the replicas of the first shard, then
    within every shard group.
    """
    if group is not None or not units:
        return ranks_of_broadcast(units, group)
    ranks = units[0].ranks
    copies = ranks.replicate if ranks.shard.rank() == 0 else None
    return tuple(g for g in (copies, ranks.shard) if g is not None and g.size() > 1)


def ranks_of_broadcast(
    units: Sequence[_FSDPState], group: dist.ProcessGroup | None
) -> Route:
    """The groups over which, one after the other, all ranks can tell each other."""
    if group is not None:
        return (group,)
    if not units:
        return ()
    both = units[0].ranks.shard, units[0].ranks.replicate
    return tuple(g for g in both if g is not None and g.size() > 1)


def share_structure(saved: Any, groups: Route) -> Any:
    """Return the first rank's ``saved``: there as it is, elsewhere to be ``unpacked``.

    Collective: one broadcast of an object per group.
    Raises: CheckpointError on all ranks, if it cannot be sent.
    """
    is_first = all(group.rank() == 0 for group in groups)
    if not groups:
        return saved
    told: Any = _packed(saved) if is_first else None
    for group in groups:
        told = collectives.broadcast_object(told, group)
    if isinstance(told, str):
        raise CheckpointError(told)
    return saved if is_first else told


def unpacked(shared: Any) -> Any:
    """What ``share_structure`` returned, with tensors in their places or described.

    Numbers and 0-d tensors are there on every rank. On the first rank all tensors are.
    Raises: as pickle, on a rank that cannot import what the first one sent.
    """
    return pickle.loads(shared) if isinstance(shared, bytes) else shared


def _packed(saved: Any) -> bytes | str:
    """The structure as bytes, or what is wrong with it."""
    try:
        return pickle.dumps(_pytree.tree_map(_describe, saved))
    except Exception as error:
        return (
            "The optimizer state of the first rank cannot be sent to the others: "
            f"{_unsent(saved)} ({type(error).__name__}: {error}). A state holds "
            "tensors, numbers, strings, lists and dicts; leave it out."
        )


def _unsent(saved: Any) -> str:
    """What of a state does not pickle: where it is, and its type."""
    for path, value in _pytree.tree_leaves_with_path(saved):
        try:
            pickle.dumps(_describe(value))
        except Exception:
            return f"{_pytree.keystr(path)} is a {type(value).__name__}"
    return "its keys do not pickle"


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    part = isinstance(value, ShardedValue)
    if value.ndim or part:
        return Described(value.shape, value.dtype, part)
    return value.cpu()


def share_tensor(
    value: Tensor | Described,
    groups: Route,
    device: torch.device,
) -> Tensor:
    """Return the first rank's tensor on every rank, on ``device``.

    Collective: one broadcast per group.
    """
    if isinstance(value, Tensor):
        whole = value.detach().to(device).contiguous()
    else:
        flat = memory.new_buffer(value.shape.numel(), value.dtype, device)
        whole = flat.view(value.shape)
    for group in groups:
        collectives.broadcast(whole, group)
    return whole
