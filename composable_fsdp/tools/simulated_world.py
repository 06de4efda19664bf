"""A process group of any size in one process, whose collectives are only noted.

Fake tensors have no values, and torch has no fake form of coalesced collectives. The
group's methods are therefore Python and stand in front of torch's dispatcher::

    dist.all_reduce ----------> SimulatedGroup.allreduce -----------> Timetable
    comm.collectives ---------> SimulatedGroup.all_gather_single ---> Timetable
    DTensor, functional forms: see ``model_sends`` -----------------> Timetable

In the order of CUDA, streams and events are those of the timetable, too: a build of
torch without CUDA has no streams, and its autograd engine refuses fake tensors on CUDA
devices (checked on torch 2.13). So simulated tensors are on the CPU.

Private names, checked on torch 2.13: ``FakeProcessGroup._create_internal``,
``ProcessGroup._register_backend``, ``_set_default_backend``, ``Backend._plugins``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    Store,
)

from composable_fsdp.comm import device
from composable_fsdp.comm.nodes import SIMULATED
from composable_fsdp.comm.operations import PHASES, operation_log
from composable_fsdp.comm.ranges import running_unit
from composable_fsdp.errors import PhaseError
from composable_fsdp.phases import Phase
from composable_fsdp.tools.timetable import Label, SimulatedEvent, Timetable

LARGEST = 1 << 20
"""Tensors of more elements have no values in a simulated step."""


@dataclass(frozen=True)
class Machine:
    """Speeds that give a simulated step its times; the memory does not depend on them.

    Args:
        operations_per_second: of matrix products. Default 4e14, near the rate of a
            large model on an H100 in bfloat16.
        memory_bytes_per_second: of other operations. Default 2e12.
        link_bytes_per_second: of a rank's link, in each direction. Default 5e10.
        latency: seconds before a collective moves its first byte. Default 2e-5.
    """

    operations_per_second: float = 4e14
    memory_bytes_per_second: float = 2e12
    link_bytes_per_second: float = 5e10
    latency: float = 2e-5


class SimulatedGroup(dist.ProcessGroup):
    """Collectives that move no data, and are noted with the bytes of a ring."""

    def __init__(
        self, rank: int, size: int, table: Timetable, machine: Machine
    ) -> None:
        # Only this form makes the C++ object that calls back into Python.
        super().__init__(rank, size)  # type: ignore[call-arg]  # not in the stub
        # The backend keeps the name of the group, and answers the other methods.
        backend = FakeProcessGroup._create_internal(rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, backend)
        self._set_default_backend(kind)
        self._table, self._machine, self._ranks = table, machine, size

    def getBackendName(self) -> str:
        """Return the name under which C++ asks for the backend."""
        return SIMULATED

    def note(self, op: str, whole: Sequence[Tensor], rounds: int = 1) -> dist.Work:
        """Note a collective, and return its work.

        Collective: none; nothing is sent.
        """
        # Fake tensors have sizes, which is all that a time needs.
        nbytes = sum(tensor.nbytes for tensor in whole)
        moved = rounds * nbytes * (self._ranks - 1) / self._ranks
        # A collective of no bytes still takes a round trip.
        machine = self._machine
        seconds = machine.latency + moved / machine.link_bytes_per_second
        return self._table.send(self._label(op, nbytes), seconds)

    def _label(self, op: str, nbytes: int) -> Label:
        """Return the label of the collective that is being sent."""
        if self._is_of_model():
            stage = self._table.stage
            unit = running_unit(stage)
            return Label(op, unit, stage, nbytes, self._name(), self._ranks, True)
        last = operation_log(self).operations[-1]
        # Without a unit, the phase is the outermost call, which is ``simulate``.
        in_step = isinstance(last.phase, Phase)
        phase = PHASES[Phase(last.phase)] if in_step else self._table.stage
        return Label(last.op, last.unit, phase, nbytes, self._name(), self._ranks)

    def _name(self) -> str:
        """Return the name of the group for a reader."""
        # The group of all ranks serves each mesh dim that has all ranks.
        if self is dist.group.WORLD:
            return "world"
        # torch calls the groups of a mesh "mesh_tp" and so on.
        return str(self.group_desc).removeprefix("mesh_")

    def _is_of_model(self) -> bool:
        """Return whether the program itself sends the collective, not the runtime."""
        # A collective of this package is in the log, and has no work yet. Collectives
        # of the program are in no log.
        sent = operation_log(self).operations
        return not sent or bool(sent[-1].work or sent[-1].waited or sent[-1].done)

    # Callers pass options, and shards beside the whole buffers, in further arguments.
    def all_gather_single(
        self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Note the gather of an ``output`` ``(ranks * n,)``."""
        if self._is_of_model():
            echo_rows(output, input, [output.shape[0] // self._ranks] * self._ranks)
        return self.note("all_gather", [output])

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Note several gathers as a single collective."""
        return self.note("all_gather", output_lists)

    def allgather(  # type: ignore[override]  # a single form of torch's two is enough
        self, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any
    ) -> dist.Work:
        """Note a gather into lists."""
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts if self._is_of_model() else ():
                echo(part, own)
        return self.note("all_gather", [t for each in outputs for t in each])

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, *args: Any
    ) -> dist.Work:
        """Note the reduction of an ``input`` ``(ranks * n,)``."""
        if self._is_of_model() and has_values(output):
            times = self._ranks if _sums(args) else 1
            echo(output, input[: output.shape[0]] * times)
        return self.note("reduce_scatter", [input])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *args: Any
    ) -> dist.Work:
        """Note several reductions as a single collective."""
        return self.note("reduce_scatter", inputs)

    def allreduce(self, tensors: list[Tensor], *args: Any) -> dist.Work:  # type: ignore[override]  # ditto
        """Note an all-reduce, which is a reduction and a gather."""
        for each in tensors if self._is_of_model() and _sums(args) else ():
            if has_values(each):
                each.mul_(self._ranks)
        return self.note("all_reduce", tensors, rounds=2)

    def broadcast(self, tensors: list[Tensor], *args: Any) -> dist.Work:  # type: ignore[override]  # ditto
        """Note a broadcast."""
        return self.note("broadcast", tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        *args: Any,
    ) -> dist.Work:
        """Note an exchange of rows; integers in ``output`` are as if all ranks agree.

        Each rank is taken to send what this rank sends: the numbers of tokens that
        experts get, for example, are those of this rank.

        Returns: the work.
        Collective: none; nothing is sent.
        """
        own = input_sizes[0] if input_sizes else input.shape[0] // self._ranks
        sizes = output_sizes or [output.shape[0] // self._ranks] * self._ranks
        if self._is_of_model():
            echo_rows(output, input[:own], sizes)
        return self.note("all_to_all", [input])

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], *args: Any
    ) -> dist.Work:
        """Note an exchange of tensors."""
        # Rank 0 gets of each rank what that rank has for it.
        for output in outputs if self._is_of_model() else ():
            echo(output, inputs[0])
        return self.note("all_to_all", inputs)

    def reduce(self, tensors: list[Tensor], *args: Any) -> dist.Work:  # type: ignore[override]  # ditto
        """Note a reduction to a rank."""
        return self.note("reduce", tensors)

    def gather(  # type: ignore[override]  # ditto
        self, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any
    ) -> dist.Work:
        """Note a gather to a rank."""
        return self.note("gather", [t for each in outputs for t in each] or inputs)

    def scatter(  # type: ignore[override]  # ditto
        self, outputs: list[Tensor], inputs: list[list[Tensor]], *args: Any
    ) -> dist.Work:
        """Note that a rank gives the others their parts."""
        return self.note("scatter", [t for each in inputs for t in each] or outputs)

    def send(self, tensors: list[Tensor], *args: Any) -> dist.Work:
        """Note a message to a rank."""
        return self.note("send", tensors)

    def recv(self, tensors: list[Tensor], *args: Any) -> dist.Work:
        """Note a message of a rank."""
        return self.note("recv", tensors)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Note a barrier."""
        # Only the latency counts.
        return self.note("barrier", [])

    # Names of torch before 2.13.
    alltoall_base = all_to_all_single  # type: ignore[assignment]  # ditto
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    # A coalesced all-reduce has the arguments of a single one.
    allreduce_coalesced = allreduce  # type: ignore[assignment]


def echo(output: Tensor, value: Tensor) -> None:
    """Give integers in ``output`` the values of ``value``, which all ranks have.

    Real numbers of a simulated step have no values, and a copy of them would be a
    computation that no rank does; neither have large tensors, and so tensors of rows.
    """
    if has_values(output) and output.shape == value.shape:
        output.copy_(value)


def has_values(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is small and of integers, as numbers of tokens are."""
    is_real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not is_real and tensor.numel() <= LARGEST


def _sums(args: Sequence[Any]) -> bool:
    """Return whether the options in ``args``, if any, ask for a sum."""
    reduction = getattr(args[0], "reduceOp", None) if args else None
    return reduction is None or reduction == dist.ReduceOp.SUM


def echo_rows(output: Tensor, own: Tensor, sizes: Sequence[int]) -> None:
    """Give integers in ``output`` the values that ranks send, if all send the same."""
    # Ranks that agree send equal numbers of rows; others have no values.
    if has_values(output) and all(size == own.shape[0] for size in sizes):
        echo(output, own.repeat(len(sizes), *[1] * (own.ndim - 1)))


_notes: list[tuple[Timetable, Machine]] = []
"""The last entry has the timetable and the speeds of new groups."""


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    """Return a group, as ``torch.distributed`` asks a backend for it."""
    # torch passes no arguments of the caller on to a backend.
    table, machine = _notes[-1]
    return SimulatedGroup(rank, size, table, machine)


@contextmanager
def simulated_world(
    world_size: int, table: Timetable, machine: Machine, *, streams: bool
) -> Iterator[None]:
    """Be rank 0 of ``world_size`` ranks that do not exist, in this block.

    Raises: PhaseError, if this process has a default process group.
    """
    if dist.is_initialized():
        raise PhaseError(
            "simulate makes process groups of its own, and this process has a default "
            f"process group ({dist.get_backend()}, {dist.get_world_size()} ranks). "
            "Call simulate before init_process_group, or in a process of its own, as "
            "`python -m composable_fsdp simulate` does."
        )
    # A backend is registered once per process, and cannot be removed.
    if SIMULATED.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(SIMULATED, _create, devices=["cpu"])
    # The stack restores everything in reverse, also after an error in the block.
    with ExitStack() as stack:
        # Units take their streams when they are made, so stand-ins come first.
        if streams:
            for target, name, value in _stand_ins(table):
                stack.enter_context(replaced_here(target, name, value))
        _notes.append((table, machine))
        stack.callback(_notes.pop)
        # The store is never read: groups of this backend have no peers to meet.
        dist.init_process_group(
            SIMULATED, store=HashStore(), rank=0, world_size=world_size
        )
        stack.callback(dist.destroy_process_group)
        yield


def _stand_ins(table: Timetable) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return replacements by streams of ``table``: owner, name and function."""
    live: weakref.WeakSet[device.Streams] = weakref.WeakSet()
    return [
        (device, "as_cuda", lambda: True),
        (device, "_Stream", table.new_stream),
        (device, "_Event", SimulatedEvent),
        # Optimizer hooks see the streams of all trees of this process.
        (device, "live_streams", lambda: live),
        (device, "use_stream", table.use),
        (device, "current_stream", lambda device=None: table.current),
        # A program may ask torch, as the runtime does before it issues work.
        (torch.cuda, "stream", table.use),
        (torch.cuda, "current_stream", lambda device=None: table.current),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ]


@contextmanager
def replaced_here(
    target: Any, name: str, function: Callable[..., Any]
) -> Iterator[None]:
    """Give an attribute another function in this block, for this thread alone.

    Other threads, such as those of a data loader or of a training on a GPU, call what
    was there before. The block ends with the attribute as before, also after an error.
    """
    plain, thread = getattr(target, name), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        # autograd runs the backward of CPU tensors in the thread that calls it.
        here = threading.get_ident() == thread
        return (function if here else plain)(*args, **kwargs)

    with replaced(target, name, chosen):
        yield


@contextmanager
def replaced(target: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value in this block."""
    # Other threads see the replacement, too: see ``replaced_here`` for functions.
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
