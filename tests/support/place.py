"""The words between the parent and its ranks: world, place, job, answer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp.state_dict.sharded import ShardedValue

COLLECTIVE_TIMEOUT = timedelta(seconds=30)
BODY = "body_on_ranks"
"""The attribute of a test that is to run on ranks: the function for each rank."""


@dataclass(frozen=True)
class World:
    """What a function that runs on a rank knows of its place."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    group: dist.ProcessGroup

    def barrier(self) -> None:
        """Wait until every rank is here. Collective: one barrier over ``group``."""
        dist.barrier(group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order.

        Collective: one object gather over ``group``.
        """
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_equal(self, value: Any) -> bool:
        """Whether every rank brought an equal ``value``; tensors compare bit by bit.

        Collective: one object gather over ``group``.
        """
        values = self.gather(value)
        return all(_same(values[0], other) for other in values[1:])


@dataclass(frozen=True)
class Place:
    """Where a rank stands and where it leaves what its parent may want to read."""

    rank: int
    world_size: int
    backend: str
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / f"rank{self.rank}.out"

    @property
    def stacks(self) -> Path:
        return self.folder / f"rank{self.rank}.stacks"


@dataclass(frozen=True)
class Job:
    """A pickled function and its arguments, and what it takes to import its module."""

    module: str
    file: str | None
    function: bytes
    arguments: bytes
    sys_path: list[str]
    warning_filters: bytes


@dataclass(frozen=True)
class Answer:
    """What one rank says after a job; ``calls`` is ``None`` without a default group."""

    error: str | None = None
    result: bytes = b""
    calls: int | None = None


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, ShardedValue):
        return left.is_part_like(right) and _same(left.local, right.local)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and _bits_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            _same(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(
            _same(a, b) for a, b in zip(left, right, strict=True)
        )
    return bool(left == right)


def _bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    # By bytes, so that NaN equals NaN and 0.0 differs from -0.0.
    if left.shape != right.shape:
        return False
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    return torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )
