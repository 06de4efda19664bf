"""``Clock``: when the computations and collectives of a simulated step begin and end.

The host issues them in its order; they run on streams and on a link::

    host     compute A | send x | compute B | wait x | compute C
    stream 0 [== A ==][=== B ===]........[== C ==]
    link              [====== x ========]

The host itself takes no time but that of ``issue``; the link serves collectives one
after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from composable_fsdp.naming import ROOT_NAME
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

    def send(self, made: SimulatedOperation, seconds: float) -> dist.Work:
        """Add a collective, and return its work."""
        return _SimulatedWork(self, self.send_on(self.current.number, made, seconds))

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
