"""``Timetable``: the computations, collectives and waits of a simulated step.

The host notes events in its order; ``times`` plays them on streams and one link::

    host     compute A | send x | compute B | wait x | compute C
    stream 0 [== A ==][=== B ===]........[== C ==]
    link              [====== x ========]

The host itself takes no time, and a link serves collectives one after the other, as a
communicator does. Collectives that the model itself sends have links of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

COMPUTE, SEND, WAIT, MARK, JOIN, BLOCK = (
    "compute",
    "send",
    "wait",
    "mark",
    "join",
    "block",
)
"""Kinds of an ``Event``. ``WAIT`` and ``JOIN``: the stream goes on behind a collective
or a mark; ``BLOCK``: the host does."""


class Label(NamedTuple):
    """A computation or a collective, for a reader; see ``SimulatedOperation``."""

    name: str
    unit: str | None
    phase: str = ""
    nbytes: int = 0
    group: str = ""
    ranks: int = 0
    by_model: bool = False

    @property
    def link(self) -> str:
        """The link of a collective: the group's own for one of the model itself."""
        # The runtime's communicators share a link, as they share the network.
        return self.group if self.by_model else ""


@dataclass(slots=True)
class Event:
    """A thing that the host did, on a stream."""

    kind: str
    stream: int
    label: Label | None
    seconds: float
    key: int
    """The collective or the mark that the event is about."""


class Timetable:
    """The events of a step, in the order of the host."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.stage = "forward"
        """The part of the step that runs, as the driver of the step says."""
        self.current = SimulatedStream(self, 0)
        """The stream that is current; the first is the one that computes."""
        self._streams = 1
        self._keys = 0

    def clear(self) -> None:
        """Forget the events so far, as those of a warm-up."""
        # Marks of the warm-up are unknown to ``times``, which takes them for the start.
        self.events.clear()

    def compute(self, label: Label, seconds: float) -> None:
        """Note a computation; computations with the same label in a row are one."""
        last = self.events[-1] if self.events else None
        stream = self.current.number
        # An operation takes microseconds; a reader of a trace looks for units.
        same = last and (last.kind, last.label, last.stream) == (COMPUTE, label, stream)
        if last and same:
            last.seconds += seconds
            return
        self.events.append(Event(COMPUTE, stream, label, seconds, -1))

    def send(self, label: Label, seconds: float) -> dist.Work:
        """Note a collective, and return its work."""
        # The key connects the collective with the waits for it.
        key = self.new_key()
        self.events.append(Event(SEND, self.current.number, label, seconds, key))
        return _SimulatedWork(self, key)

    def note(self, kind: str, stream: int, key: int) -> None:
        """Note a mark, or that a stream or the host goes on behind ``key``."""
        self.events.append(Event(kind, stream, None, 0.0, key))

    def new_key(self) -> int:
        """Return a number that no other mark or collective has."""
        self._keys += 1
        return self._keys

    def new_stream(self, *args: object, **kwargs: object) -> SimulatedStream:
        """Return a further stream; takes the arguments of ``torch.cuda.Stream``."""
        # Arguments are a device and a priority, neither of which changes the order.
        self._streams += 1
        return SimulatedStream(self, self._streams - 1)

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        """Make ``stream`` current in a block, as ``torch.cuda.stream`` does."""
        # Blocks are nested, as those of torch are.
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def times(self) -> list[float]:
        """Return the seconds from the start at which each event begins."""
        ready: defaultdict[int, float] = defaultdict(float)
        # When a mark is reached, or a collective is done.
        reached: dict[int, float] = {}
        links: defaultdict[str, float] = defaultdict(float)
        host = 0.0
        found: list[float] = []
        for event in self.events:
            # Nothing begins before the host has issued it.
            begin = max(ready[event.stream], host)
            if event.kind == COMPUTE:
                ready[event.stream] = begin + event.seconds
            elif event.kind == SEND:
                # The link is busy with the collectives that were sent before.
                link = "" if event.label is None else event.label.link
                begin = max(begin, links[link])
                reached[event.key] = links[link] = begin + event.seconds
            elif event.kind == MARK:
                reached[event.key] = begin
            elif event.kind == BLOCK:
                host = max(host, reached.get(event.key, 0.0))
            # A wait or a join moves its stream only.
            else:
                begin = max(begin, reached.get(event.key, 0.0))
                ready[event.stream] = begin
            found.append(begin)
        return found


class _SimulatedWork(dist.Work):
    """A collective of a timetable."""

    def __init__(self, timetable: Timetable, key: int) -> None:
        super().__init__()
        self._timetable, self._key = timetable, key

    def is_completed(self) -> bool:
        """Return True: no data is moved, so nothing is missing."""
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the next work of the current stream behind the collective."""
        # On CPU the host itself waits, and everything is on the first stream.
        table = self._timetable
        table.note(WAIT, table.current.number, self._key)
        return True


class SimulatedStream:
    """Stands in for a ``torch.cuda.Stream``."""

    def __init__(self, timetable: Timetable, number: int) -> None:
        self.timetable, self.number = timetable, number

    def mark(self) -> int:
        """Return a key for the end of the stream's work so far."""
        key = self.timetable.new_key()
        self.timetable.note(MARK, self.number, key)
        return key

    def wait_event(self, event: SimulatedEvent) -> None:
        """Go on behind the last record of ``event``."""
        self.timetable.note(JOIN, self.number, event.key)

    def wait_stream(self, other: SimulatedStream) -> None:
        """Go on behind all that ``other`` was given."""
        self.timetable.note(JOIN, self.number, other.mark())

    def synchronize(self) -> None:
        """Make the host wait."""
        self.timetable.note(BLOCK, self.number, self.mark())


class SimulatedEvent:
    """Stands in for a ``torch.cuda.Event``."""

    def __init__(self) -> None:
        self.key = -1

    def record(self, stream: SimulatedStream) -> None:
        """Mark the end of the work of ``stream`` so far."""
        self.key = stream.mark()
