"""A process group of any world size in one process, on a network link that takes time.

The data stay as they are, as in ``NullGroup``; what is modelled is *when* a collective
is done. All groups of the process share one link that serves collectives in the order
in which they were issued, as one communicator does::

    issue A   issue B            wait A        wait B
      |---------|-- compute -------|............|        . the caller waits
    link [== A ======][== B ==================]

What the collectives run on decides what time is: ``WallLink`` is done when the clock on
the wall says so, and ``BackwardSchedule`` (``schedule.py``) notes calls and waits, from
which times are computed for any link. Neither needs a thread: the link moves on while
the caller computes, and ``wait`` sleeps for what is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from benchmarks.null_group import DONE, NullGroup, equal_tags, met_in_store
from composable_fsdp.features.guard import same_models

BACKEND = "link"


class Network(Protocol):
    """What collectives are sent over."""

    def send(self, op: str, buffers: Sequence[Tensor], nbytes: float) -> dist.Work:
        """Begin to move ``nbytes`` for the collective ``op`` on ``buffers``."""


class LinkGroup(NullGroup):
    """Collectives that take what ``network`` says; bytes are those of a ring."""

    def __init__(self, rank: int, size: int, network: Network) -> None:
        super().__init__(rank, size)
        self._network = network

    def getBackendName(self) -> str:
        """Name under which C++ asks for the backend."""
        return BACKEND

    def _send(self, op: str, whole: Sequence[Tensor], rounds: int = 1) -> dist.Work:
        """Each round moves all but this rank's part of the whole buffers."""
        size = self._world_size
        nbytes = sum(tensor.nbytes for tensor in whole) * (size - 1) / size
        return self._network.send(op, whole, rounds * nbytes)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: object = None
    ) -> dist.Work:
        """Gather one ``output`` ``(world * n,)``."""
        super().all_gather_single(output, input)
        return self._send("all_gather", [output])

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: object = None
    ) -> dist.Work:
        """Gather several, in one go."""
        for output, input in zip(output_lists, input_list, strict=True):
            super().all_gather_single(output, input)
        return self._send("all_gather", output_lists)

    def allgather(  # type: ignore[override]  # as in NullGroup
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: object = None,
    ) -> dist.Work:
        """Gather into lists, as FSDP1 does on CPU."""
        super().allgather(output_tensors, input_tensors)
        return self._send("all_gather", [t for ts in output_tensors for t in ts])

    def reduce_scatter_single(  # type: ignore[override]  # NullGroup's takes anything
        self, output: Tensor, input: Tensor, opts: object = None
    ) -> dist.Work:
        """Scatter the sums of one ``input`` ``(world * n,)``."""
        return self._send("reduce_scatter", [input])

    def reduce_scatter_single_coalesced(  # type: ignore[override]  # ditto
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """Scatter the sums of several, in one go."""
        return self._send("reduce_scatter", inputs)

    def allreduce(  # type: ignore[override]  # as in NullGroup
        self, tensors: list[Tensor], opts: object = None
    ) -> dist.Work:
        """Reduce and gather: two rounds."""
        return self._send("all_reduce", tensors, rounds=2)

    # Torch's names before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


class WallLink:
    """A link of so many bytes a second; each collective also waits for ``latency``.

    ``bytes_per_second`` may be changed between steps; ``waited`` are the seconds that
    callers slept.
    """

    def __init__(self, bytes_per_second: float, *, latency: float = 0.0) -> None:
        self.bytes_per_second, self.latency = bytes_per_second, latency
        self.waited = 0.0
        self._free = 0.0

    def send(self, op: str, buffers: Sequence[Tensor], nbytes: float) -> dist.Work:
        """Queue behind what is on the link already."""
        begin = max(self._free, time.perf_counter())
        self._free = begin + self.latency + nbytes / self.bytes_per_second
        return _Arrival(self, self._free)


class _Arrival(dist.Work):
    """A collective that is done at a time known from its start."""

    def __init__(self, link: WallLink, done: float) -> None:
        super().__init__()
        self._link, self._done = link, done

    def is_completed(self) -> bool:
        """Whether its last byte has arrived."""
        return time.perf_counter() >= self._done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep until it has."""
        left = self._done - time.perf_counter()
        if left > 0:
            self._link.waited += left
            time.sleep(left)
        return True


class _Immediately:
    """Set-up outside of any link costs nothing."""

    def send(self, op: str, buffers: Sequence[Tensor], nbytes: float) -> dist.Work:
        return DONE


_network: Network = _Immediately()


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> LinkGroup:
    return LinkGroup(rank, size, _network)


@contextmanager
def link_world(world_size: int, network: Network) -> Iterator[None]:
    """Make this process rank 0 of ``world_size`` ranks that do not exist.

    The default group and all groups made inside share ``network``.
    """
    global _network
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    outer, _network = _network, network
    dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=world_size)
    try:
        # The other ranks are taken to make the same calls.
        # Nobody answers, and the first step sends what later steps send.
        same = mock.patch.object(same_models, "_compare", return_value=None)
        with same, met_in_store(), equal_tags():
            yield
    finally:
        dist.destroy_process_group()
        _network = outer
