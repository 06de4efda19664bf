"""Where a local shard lies in the full value, and which ranks hold the other shards."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.flat.param_form import ParamForm


class ShardPlace(NamedTuple):
    """The box of a local shard; field names as in torch's ShardedTensor."""

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]


class LocalShard(NamedTuple):
    """A box of a sharded value on this rank, and its place in the full value."""

    tensor: Tensor
    metadata: ShardPlace


Within = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape and offset of a rectangle, and the number of rectangles of the full value."""


class GroupAndDevice:
    """The process group and device for ``full_tensor``; not pickled with the value."""

    __slots__ = ("device", "form", "group")

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        form: ParamForm | None = None,
    ) -> None:
        self.group = None if group is None else GroupRef(group)
        self.device = device
        self.form = form

    def __deepcopy__(self, memo: dict[int, object]) -> GroupAndDevice:
        """Return ``self``: copies share the process group."""
        return self
