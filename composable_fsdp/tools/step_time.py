"""``Clock``: when the computations and collectives of a step begin and end.

The host takes no time but that of ``issue``; the link serves one collective at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.machine import FUSED, MEMORY, Cost, Machine
from composable_fsdp.tools.memory import (
    Activations,
    OptimizerMemory,
    StepMoment,
    gathered_bytes,
)
from composable_fsdp.tools.step_memory import FREE, GATHER, REDUCE

COMPUTE, COMMUNICATION = "compute", "communication"


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


class StepTime(NamedTuple):
    """Seconds of a step of a rank: in all, computing, waiting for collectives or host.

    ``tokens`` are those of the batch of the rank; rows of a batch that has no ids.
    """

    seconds: float
    computing: float
    waiting: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and rank."""
        return self.tokens / self.seconds


def time_of_step(
    moments: Sequence[StepMoment],
    units: Sequence[UnitPlan],
    machine: Machine,
    activations: Activations,
    optimizer: OptimizerMemory,
    *,
    compiled: bool,
    float8: bool,
) -> StepTime:
    """Return the time of the operations of ``moments`` on streams and a link."""
    by_name = {unit.fqn: unit for unit in units}
    clock = Clock(machine)
    gathers, reductions = clock.new_stream().number, clock.new_stream().number
    # When the full parameters of a unit were there, and when they were used last.
    arrived, used = dict.fromkeys(by_name, 0.0), dict.fromkeys(by_name, 0.0)
    filled: set[str] = set()
    left_out = MEMORY if compiled else FUSED

    def send(stream: int, seconds: float) -> float:
        sent = SimulatedOperation(COMMUNICATION, "", None)
        clock.go_on(stream, clock.send_on(stream, sent, seconds))
        return clock.reached(stream)

    for event in (moment.event for moment in moments[:-1]):
        name, unit = event.unit, by_name[event.unit]
        if event.kind == GATHER:
            seconds = _gather(unit, machine, is_first=event.phase == "forward")
            arrived[name] = send(gathers, seconds)
        elif event.kind == FREE:
            # The host waits for the unit whose memory the next all-gather takes.
            clock.block(used[name])
        elif event.kind != REDUCE:
            clock.go_on(0, arrived[name])
            seconds = issued = 0.0
            for cost, times in activations.work.get(event, {}).items():
                if cost.kind != left_out:
                    low = float8 and bool(name)
                    seconds += times * machine.seconds(cost, float8=low)
                    issued += times * machine.launch
            clock.compute(name, seconds)
            # Meanwhile the host issues what follows.
            clock.issue(issued)
            used[name] = clock.reached(0)
        # First the gradients move into the buffers, then they are sent.
        elif name in filled:
            clock.go_on(reductions, clock.reached(0))
            send(reductions, _reduction(unit, machine))
        else:
            filled.add(name)
    clock.go_on(0, clock.reached(reductions))
    moved = Cost(MEMORY, 0, _optimizer_bytes(units, optimizer))
    clock.compute(None, machine.seconds(moved))
    busy = sum(o.end - o.begin for o in clock.operations if o.kind == COMPUTE)
    end = clock.reached(0)
    return StepTime(end, busy, end - busy, activations.tokens)


def _optimizer_bytes(units: Sequence[UnitPlan], optimizer: OptimizerMemory) -> int:
    """Return what the optimizer moves: it writes all that it reads but gradients."""
    return sum(
        2 * (each.parameter_bytes + optimizer.state_bytes(each))
        + each.gradient_bytes
        + 6 * optimizer.temporary_bytes(each)
        for each in units
        if each.is_trainable
    )


def _gather(unit: UnitPlan, machine: Machine, *, is_first: bool) -> float:
    """Return the seconds of the all-gathers of a unit, over pieces and within one."""
    ranks = unit.shard_world_size
    if unit.piece_ranks and (unit.has_rest or not is_first):
        ranks = unit.piece_ranks
    seconds = machine.collective(gathered_bytes(unit), ranks)
    if unit.has_rest and is_first:
        seconds += machine.collective(unit.piece_bytes, unit.shard_world_size // ranks)
    return seconds


def _reduction(unit: UnitPlan, machine: Machine) -> float:
    """Return the seconds of the reductions of a unit, over shards and replicas."""
    nbytes, ranks = unit.reduce_bytes, unit.gradient_ranks
    # Replicas of a shard are in different nodes, if a group fills its nodes.
    apart = ranks >= machine.node_size > 1
    own = machine.collective(nbytes // ranks, unit.sum_ranks, rounds=2, apart=apart)
    return machine.collective(nbytes, ranks) + own
