"""A process group of any world size in one process, whose collectives do nothing.

Host time is what the training loop costs the CPU; the collective itself costs every
library the same, so it is taken out. Torch's ``fake`` backend copies the input once per
rank in each all-gather, which grows with the world and drowns what is measured. This
group returns one finished ``Work``, made once:

    dist.all_gather_single ── attribute lookup ──> NullGroup.all_gather_single ──> DONE

A Python subclass of ``ProcessGroup`` is slow only where C++ calls it through the
binding (one gradient bucket of DDP, one norm of FSDP2's DTensors a step). Every
per-unit collective of FSDP1, FSDP2 and ours starts in Python and finds the method below
directly, without dispatcher and binding: under 0.2 microseconds, the same for all.

Floating-point results are left as they were, so **losses mean nothing here**. Integers
are metadata (hashes, shapes, pickled objects): they are gathered as if all ranks had
sent the same, so that the libraries' consistency checks pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # stub lacks one
    FakeProcessGroup,
    FakeWork,
    HashStore,
    Store,
    _create_work_from_future,
)

from composable_fsdp.access import grads
from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import AgreedName, Peers
from composable_fsdp.features.guard import meetings

BACKEND = "null"

DONE = FakeWork()


class NullGroup(dist.ProcessGroup):
    """Collectives that return at once and move no floating-point data."""

    def __init__(self, rank: int, size: int) -> None:
        # Only this form makes the C++ object that calls back into Python.
        super().__init__(rank, size)  # type: ignore[call-arg]  # not in the stub
        # Keeps the group's name, and answers what is not overridden below.
        backend = FakeProcessGroup._create_internal(rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, backend)
        self._set_default_backend(kind)
        self._world_size = size

    def getBackendName(self) -> str:
        """Name under which C++ asks for the backend."""
        return BACKEND

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: object = None
    ) -> dist.Work:
        """Leave ``output`` ``(world * n,)`` alone, unless it holds integers."""
        if not input.is_floating_point():
            output.view(self._world_size, -1).copy_(input.view(1, -1))
        return DONE

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: object = None
    ) -> dist.Work:
        """Several all-gathers under one call."""
        for output, input in zip(output_lists, input_list, strict=True):
            self.all_gather_single(output, input)
        return DONE

    def allgather(  # type: ignore[override]  # one of torch's two forms is enough here
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: object = None,
    ) -> dist.Work:
        """Gather into lists, as FSDP1 does on CPU and ``all_gather_object`` does."""
        if not input_tensors[0].is_floating_point():
            for outputs, input in zip(output_tensors, input_tensors, strict=True):
                for output in outputs:
                    output.copy_(input)
        return DONE

    def allgather_coalesced(
        self,
        output_lists: list[list[Tensor]],
        input_list: list[Tensor],
        opts: object = None,
    ) -> dist.Work:
        """Several list all-gathers under one call."""
        return DONE

    def allreduce(  # type: ignore[override]  # one of torch's three forms is enough
        self, tensors: list[Tensor], opts: object = None
    ) -> dist.Work:
        """Leave the tensors alone; DDP reads them from the work's future."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(tensors))
        work: dist.Work = _create_work_from_future(future)
        return work

    def _no_op(self, *args: object, **kwargs: object) -> dist.Work:
        return DONE

    # Torch's names before 2.13, then all that has no result to fake.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single = _no_op
    reduce_scatter_single_coalesced = _no_op
    _reduce_scatter_base = _no_op
    reduce_scatter_tensor_coalesced = _no_op
    reduce_scatter = _no_op
    allreduce_coalesced = _no_op
    broadcast = _no_op
    barrier = _no_op


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> NullGroup:
    return NullGroup(rank, size)


def is_collective(frame: FrameType) -> bool:
    """Whether a just entered ``frame`` is a call of a group's method from outside."""
    caller = frame.f_back
    return frame.f_code.co_filename == __file__ and (
        caller is None or caller.f_code.co_filename != __file__
    )


@contextmanager
def null_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of ``world_size`` ranks that do not exist.

    The default group and all groups made inside are null groups. Where this rank waits
    in the key-value store, the others are taken to be there: they would come as soon.
    """
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=world_size)
    # No other rank refuses a step.
    step = mock.patch.object(Peers, "share", return_value=None)
    # A sum over this group is the number of one rank.
    clip = mock.patch.object(grads, "can_compare", return_value=False)
    try:
        with step, clip, met_in_store(), equal_tags():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def met_in_store() -> Iterator[None]:
    """Take the other ranks to answer in the key-value store."""
    # A second model in the group departs from the order of the first.
    met = mock.patch.object(meetings, "meet_ranks")
    with met, mock.patch.object(AgreedName, "step", _name):
        yield


def _name(agreed: AgreedName) -> bool:
    """Take the other ranks to have agreed."""
    agreed.name = agreed._label
    return True


@contextmanager
def equal_tags() -> Iterator[None]:
    """Take the other ranks to send this rank's tags; fake tensors have no values."""

    def equal(
        op: str, numbers: Sequence[int], group: dist.ProcessGroup, *_: object
    ) -> list[int]:
        return [*numbers] * group.size()

    with mock.patch.object(collectives, "all_gather_numbers", equal):
        yield
