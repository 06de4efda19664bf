"""A process group of any size in one process, whose collectives are only noted, and
``Clock``: when the computations and collectives of a step begin and end.

The host issues them in its order; they run on streams and on a link::

    host     compute A | send x | compute B | wait x | compute C
    stream 0 [== A ==][=== B ===]........[== C ==]
    link              [====== x ========]

The host itself takes no time but that of ``issue``; the link serves collectives one
after the other.

torch has no fake form of coalesced collectives, so the group's methods are Python and
stand in front of torch's dispatcher. In the order of CUDA, streams and events are
stand-ins, too: torch without CUDA refuses a backward of fake tensors on CUDA devices
(checked on 2.13), so simulated tensors are on the CPU.

Private names, checked on torch 2.13: ``FakeProcessGroup._create_internal``,
``ProcessGroup._register_backend``, ``_set_default_backend``, ``Backend._plugins``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from composable_fsdp.comm import device
from composable_fsdp.comm.groups import SIMULATED, operation_log
from composable_fsdp.comm.operations import PHASES, running_unit
from composable_fsdp.errors import PhaseError
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.phases import Phase
from composable_fsdp.tools.machine import Machine

COMPUTE, COMMUNICATION = "compute", "communication"
"""Kinds of a ``SimulatedOperation``."""


class SimulatedOperation(NamedTuple):
    """A computation or a collective of a step; times are seconds since its start.

    ``name`` is "forward", "backward", "clip", "optimizer step", or a collective;
    ``unit`` is None if no single unit is concerned; ``stream`` is 0 for that of the
    program. Of a collective: the phase in which it is sent, the bytes of whole buffers,
    and the mesh dimension of its group or "world".
    """

    kind: str
    name: str
    unit: str | None
    begin: float = 0.0
    end: float = 0.0
    stream: int = 0
    phase: str = ""
    nbytes: int = 0
    group: str = ""
    ranks: int = 0

    @property
    def title(self) -> str:
        """The name with the unit, as "all_gather blocks.0"."""
        return self.name + ("" if self.unit is None else f" {self.unit or ROOT_NAME}")


class Clock:
    """The operations of a step, and the times that streams, link and host reached."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stage = "set-up"
        """The part of the step that runs, as the driver of the step says."""
        self.operations: list[SimulatedOperation] = []
        self.current = SimulatedStream(self, 0)
        """The stream that is current; the first is the one that computes."""
        self._streams = 1
        self._ready: defaultdict[int, float] = defaultdict(float)
        # Communicators share a link, as they share the network.
        self._link = self._host = self._start = self._now = 0.0

    @property
    def seconds(self) -> float:
        """When the last operation of the host takes effect, since the start."""
        return self._now - self._start

    def restart(self) -> None:
        """Begin a step, behind all that was issued so far, as by a warm-up."""
        reached = [self._host, *self._ready.values(), self._link]
        self._start = self._host = self._now = max(reached)
        self.operations.clear()

    def compute(self, unit: str | None, seconds: float) -> None:
        """Add a computation; equal ones in a row are one."""
        stream = self.current.number
        begin = self.reached(stream) - self._start
        made = SimulatedOperation(COMPUTE, self.stage, unit, begin, begin, stream)
        last = self.operations[-1] if self.operations else None
        # An operation takes microseconds; a reader of a trace looks for units.
        if last and last._replace(begin=begin, end=begin) == made and last.end == begin:
            made = self.operations.pop()
        self._ready[stream] = self._now = begin + seconds + self._start
        self.operations.append(made._replace(end=self.seconds))

    def issue(self, seconds: float) -> None:
        """Let the host need ``seconds`` for what it has issued last."""
        self._host += seconds
        self.go_on(self.current.number, self._host)

    def send_on(self, stream: int, made: SimulatedOperation, seconds: float) -> float:
        """Add a collective behind the work of ``stream``, and return when it ends."""
        # The link is busy with the collectives that were sent before.
        begin = self._now = max(self.reached(stream), self._link)
        end = self._link = begin + seconds
        times = begin - self._start, end - self._start
        self.operations.append(
            made._replace(begin=times[0], end=times[1], stream=stream)
        )
        return end

    def reached(self, stream: int) -> float:
        """Return when the work of ``stream`` so far is done."""
        # Nothing begins before the host has issued it.
        self._now = max(self._ready[stream], self._host)
        return self._now

    def go_on(self, stream: int, behind: float) -> None:
        """Let later work of ``stream`` begin at ``behind`` or after."""
        self._ready[stream] = self._now = max(self.reached(stream), behind)

    def block(self, until: float) -> None:
        """Make the host wait."""
        self._host = max(self._host, until)

    def new_stream(self, *args: object, **kwargs: object) -> SimulatedStream:
        """Return a further stream; takes the arguments of ``torch.cuda.Stream``."""
        # Arguments are a device and a priority, neither of which changes the order.
        self._streams += 1
        return SimulatedStream(self, self._streams - 1)

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        """Make ``stream`` current in a block, as ``torch.cuda.stream`` does."""
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer


class _SimulatedWork(dist.Work):
    """A collective that ends at a time."""

    def __init__(self, clock: Clock, end: float) -> None:
        super().__init__()
        self._clock, self._end = clock, end

    def is_completed(self) -> bool:
        """Return True: no data is moved, so nothing is missing."""
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the next work of the current stream behind the collective."""
        # On CPU the host itself waits, and everything is on the first stream.
        self._clock.go_on(self._clock.current.number, self._end)
        return True


class SimulatedStream:
    """Stands in for a ``torch.cuda.Stream``."""

    def __init__(self, clock: Clock, number: int) -> None:
        self.clock, self.number = clock, number

    def wait_event(self, event: SimulatedEvent) -> None:
        """Go on behind the last record of ``event``."""
        self.clock.go_on(self.number, event.reached)

    def wait_stream(self, other: SimulatedStream) -> None:
        """Go on behind all that ``other`` was given."""
        self.clock.go_on(self.number, self.clock.reached(other.number))

    def synchronize(self) -> None:
        """Make the host wait."""
        self.clock.block(self.clock.reached(self.number))


class SimulatedEvent:
    """Stands in for a ``torch.cuda.Event``."""

    reached = 0.0

    def record(self, stream: SimulatedStream) -> None:
        """Mark the end of the work of ``stream`` so far."""
        self.reached = stream.clock.reached(stream.number)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _noted(kind: str) -> Any:
    """Return a method of a process group that notes a collective of ``kind``."""

    def method(self: SimulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        # What is written and what is sent; a collective in place has one of them.
        written, sent = map(tensors_of, (*args, None, None)[:2])
        gathers = kind.endswith("gather") and written
        return self.note(kind, written if gathers else sent or written)

    return method


class SimulatedGroup(dist.ProcessGroup):
    """Collectives that move no data, and are noted with the bytes of a ring."""

    def __init__(self, rank: int, size: int, clock: Clock) -> None:
        # Only this form makes the C++ object that calls back into Python.
        super().__init__(rank, size)  # type: ignore[call-arg]  # not in the stub
        # The backend keeps the name of the group, and answers the other methods.
        backend = FakeProcessGroup._create_internal(rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, backend)
        self._set_default_backend(kind)
        self._clock = clock

    def getBackendName(self) -> str:
        """Return the name under which C++ asks for the backend."""
        return SIMULATED

    def note(self, op: str, whole: Sequence[Tensor]) -> dist.Work:
        """Note a collective of whole buffers."""
        # The bytes of a sum go twice around the ring.
        rounds = 1 + (op == "all_reduce")
        nbytes = sum(tensor.nbytes for tensor in whole)
        seconds = self._clock.machine.collective(nbytes, self.size(), rounds=rounds)
        # torch calls the groups of a mesh "mesh_tp" and so on; the group of all ranks
        # serves each mesh dim that has all ranks.
        is_world = self is dist.group.WORLD
        name = "world" if is_world else str(self.group_desc).removeprefix("mesh_")
        phase = self._clock.stage
        unit = running_unit(phase)
        # A collective of this package is in the log, and has no work yet. Those of the
        # program are in no log.
        last = next(reversed(operation_log(self).operations), None)
        if last is not None and not (last.work or last.waited or last.done):
            op, unit = last.op, last.unit
            # Without a unit, the phase is the outermost call, which is ``simulate``.
            if isinstance(last.phase, Phase):
                phase = PHASES[Phase(last.phase)]
        made = SimulatedOperation(COMMUNICATION, op, unit)._replace(
            phase=phase, nbytes=nbytes, group=name, ranks=self.size()
        )
        clock = self._clock
        return _SimulatedWork(clock, clock.send_on(clock.current.number, made, seconds))

    all_gather_single = all_gather_single_coalesced = _noted("all_gather")
    reduce_scatter_single = reduce_scatter_single_coalesced = _noted("reduce_scatter")
    # A coalesced all-reduce has the arguments of a single one.
    allreduce = allreduce_coalesced = _noted("all_reduce")
    allgather = all_gather_single
    all_to_all_single = alltoall = _noted("all_to_all")
    broadcast = _noted("broadcast")
    reduce = _noted("reduce")
    gather = _noted("gather")
    scatter = _noted("scatter")
    send = _noted("send")
    recv = _noted("recv")
    barrier = _noted("barrier")
    # Names of torch before 2.13.
    alltoall_base = all_to_all_single
    _allgather_base = allgather_into_tensor_coalesced = all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter_single


_clocks: list[Clock] = []
"""The last entry is the clock of new groups: torch passes no arguments to a backend."""


@contextmanager
def simulated_world(world_size: int, clock: Clock, *, streams: bool) -> Iterator[None]:
    """Be rank 0 of ``world_size`` ranks that do not exist, in this block.

    Raises: PhaseError, if this process has a default process group.
    """
    if dist.is_initialized():
        raise PhaseError(
            "simulate makes process groups of its own, and this process has a default "
            f"process group ({dist.get_backend()}, {dist.get_world_size()} ranks). "
            "Call simulate before init_process_group, or in a process of its own."
        )
    # A backend is registered once per process, and cannot be removed.
    if SIMULATED.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            SIMULATED,
            lambda store, rank, size, timeout: SimulatedGroup(rank, size, _clocks[-1]),
            devices=["cpu"],
        )
    plain = DeviceMesh.__init__

    # Fake tensors of a step are on the CPU, also if the script trains on GPUs.
    @wraps(plain)
    def make(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain(self, "cpu", *args, **kwargs)

    # The stack restores everything in reverse, also after an error in the block.
    with ExitStack() as stack:
        stack.enter_context(replaced(DeviceMesh, "__init__", make))
        # Units take their streams when they are made, so stand-ins come first.
        for target, name, value in _stand_ins(clock) if streams else ():
            stack.enter_context(replaced(target, name, value))
        _clocks.append(clock)
        stack.callback(_clocks.pop)
        # The store is never read: groups of this backend have no peers to meet.
        dist.init_process_group(
            SIMULATED, store=HashStore(), rank=0, world_size=world_size
        )
        stack.callback(dist.destroy_process_group)
        yield


def _stand_ins(clock: Clock) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return replacements by streams of ``clock``: owner, name and function."""
    live: weakref.WeakSet[device.Streams] = weakref.WeakSet()

    def current_stream(device: object = None) -> SimulatedStream:
        return clock.current

    return [
        (device, "as_cuda", lambda: True),
        (device, "_Stream", clock.new_stream),
        (device, "_Event", SimulatedEvent),
        # Optimizer hooks see the streams of all trees of this process.
        (device, "live_streams", lambda: live),
        (device, "use_stream", clock.use),
        (device, "current_stream", current_stream),
        # A program may ask torch, as the runtime does before it issues work.
        (torch.cuda, "stream", clock.use),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ]


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value in this block."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
