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


_Sides = tuple[list[Tensor], list[Tensor]]
"""The tensors that a collective writes, and those that this rank sends."""


def _noted(kind: str, sides: Callable[..., _Sides], *, rounds: int = 1) -> Any:
    """Return a method of a process group that notes a collective of ``kind``.

    ``sides`` finds the tensors among the arguments; behind them are options, and the
    sizes of parts. ``rounds``: how often the bytes go around the ring.
    """

    def method(self: SimulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        outputs, inputs = sides(*args)
        if self.is_of_model():
            times = self.size() if "reduce" in kind and _sums(args[1:]) else 1
            # A list of tensors has one of each rank, and no sizes.
            sizes = args[2:4] if isinstance(args[0], Tensor) else ()
            # This rank is rank 0, and gets of each rank what that has for rank 0.
            mine = inputs[:1] * len(outputs) if kind == "all_to_all" else inputs
            for output, own in zip(outputs, mine, strict=False):
                share(kind, self.size(), output, own, times=times, sizes=sizes)
        gathers = kind.endswith("gather") and outputs
        return self.note(kind, outputs if gathers else inputs or outputs, rounds)

    return method


def _sums(args: Sequence[Any]) -> bool:
    """Return whether the options in ``args``, if any, ask for a sum."""
    reductions = [each.reduceOp for each in args if hasattr(each, "reduceOp")]
    return all(each == dist.ReduceOp.SUM for each in reductions)


def _pair(output: Tensor, own: Tensor, *_: Any) -> _Sides:
    return [output], [own]


def _lists(outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> _Sides:
    return outputs, inputs


def _in_place(tensors: list[Tensor], *_: Any) -> _Sides:
    return tensors, tensors


def _gathered(outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> _Sides:
    # Each part of a list is what one rank sends.
    parts = [part for each in outputs for part in each]
    return parts, [own for own in inputs for _ in range(len(parts) // len(inputs))]


def _scattered(outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any) -> _Sides:
    return outputs, [part for each in inputs for part in each]


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
        self._table, self._machine = table, machine

    def getBackendName(self) -> str:
        """Return the name under which C++ asks for the backend."""
        return SIMULATED

    def note(self, op: str, whole: Sequence[Tensor], rounds: int = 1) -> dist.Work:
        """Note a collective, and return its work; nothing is sent."""
        # Fake tensors have sizes, which is all that a time needs.
        nbytes = sum(tensor.nbytes for tensor in whole)
        moved = rounds * nbytes * (self.size() - 1) / self.size()
        # A collective of no bytes still takes a round trip.
        machine = self._machine
        seconds = machine.latency + moved / machine.link_bytes_per_second
        return self._table.send(self._label(op, nbytes), seconds)

    def _label(self, op: str, nbytes: int) -> Label:
        """Return the label of the collective that is being sent."""
        # The group of all ranks serves each mesh dim that has all ranks. torch calls
        # the groups of a mesh "mesh_tp" and so on.
        is_world = self is dist.group.WORLD
        name = "world" if is_world else str(self.group_desc).removeprefix("mesh_")
        stage, ranks = self._table.stage, self.size()
        if self.is_of_model():
            return Label(op, running_unit(stage), stage, nbytes, name, ranks, True)
        last = operation_log(self).operations[-1]
        # Without a unit, the phase is the outermost call, which is ``simulate``.
        in_step = isinstance(last.phase, Phase)
        phase = PHASES[Phase(last.phase)] if in_step else stage
        return Label(last.op, last.unit, phase, nbytes, name, ranks)

    def is_of_model(self) -> bool:
        """Return whether the program itself sends the collective, not the runtime."""
        # A collective of this package is in the log, and has no work yet. Collectives
        # of the program are in no log.
        sent = operation_log(self).operations
        return not sent or bool(sent[-1].work or sent[-1].waited or sent[-1].done)

    all_gather_single = _noted("all_gather", _pair)
    all_gather_single_coalesced = _noted("all_gather", _lists)
    allgather = _noted("all_gather", _gathered)
    reduce_scatter_single = _noted("reduce_scatter", _pair)
    reduce_scatter_single_coalesced = _noted("reduce_scatter", _lists)
    # A coalesced all-reduce has the arguments of a single one.
    allreduce = allreduce_coalesced = _noted("all_reduce", _in_place, rounds=2)
    all_to_all_single = _noted("all_to_all", _pair)
    alltoall = _noted("all_to_all", _lists)
    broadcast = _noted("broadcast", _in_place)
    reduce = _noted("reduce", _in_place)
    gather = _noted("gather", _gathered)
    scatter = _noted("scatter", _scattered)
    send = _noted("send", _in_place)
    recv = _noted("recv", _in_place)
    barrier = _noted("barrier", lambda *_: ([], []))
    # Names of torch before 2.13.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def share(
    kind: str,
    ranks: int,
    output: Tensor,
    own: Tensor,
    *,
    times: int = 1,
    sizes: Sequence[Any] = (),
) -> None:
    """Give integers in ``output`` their values, if all ranks send what this one sends.

    The numbers of tokens that experts get, for example, are those of this rank. Real
    numbers of a simulated step have no values, and a copy of them would be a
    computation that no rank does; neither have large tensors.

    Args:
        kind: the collective.
        ranks: the size of the group.
        output: what the collective writes; may be ``own``.
        own: what this rank sends.
        times: by which factor a reduction over equal numbers changes them. Default 1.
        sizes: of an all-to-all, rows from each rank and rows for each rank; empty for
            equal ones.
    """
    is_real = output.dtype.is_floating_point or output.dtype.is_complex
    if is_real or output.numel() > LARGEST or (output is own and times == 1):
        return
    if kind == "all_to_all" and len(sizes) == 2:
        own = own[: (sizes[1] or [own.shape[0] // ranks])[0]]
        # Ranks that agree send equal numbers of rows; others have no values.
        agree = all(rows == own.shape[0] for rows in sizes[0] or ())
        value = _of_all(own, ranks if agree else 0)
    elif kind == "all_gather" and output.shape != own.shape:
        value = _of_all(own, ranks)
    else:
        # A reduction leaves each rank a part; a sum over ranks multiplies.
        value = (own[: output.shape[0]] if own.ndim else own) * times
    if output.shape == value.shape:
        output.copy_(value)


def _of_all(own: Tensor, ranks: int) -> Tensor:
    """Return the rows of all ranks."""
    return own.repeat(ranks, *[1] * (own.ndim - 1))


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
