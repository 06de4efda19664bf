"""What a step issued, waited for and computed, in order; and how long that would take.

A ``BackwardSchedule`` is the network of a ``link_group`` that notes instead of
sleeping. With ``on_streams`` it also stands in for CUDA streams and events, on the CPU:
ours, FSDP2 and FSDP1 then go the way they go on a GPU, where the host runs ahead.
``counting`` notes the operations of matrix products. The same model on fake tensors
gives the same schedule without computing anything, at any size.

``BackwardSchedule.times`` then plays the events on a machine of so many operations a
second with a link of so many bytes a second. It is arithmetic: no clock, the same every
time.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from composable_fsdp.comm import device as device_layer
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import TrainableRegion


class Event(NamedTuple):
    """One thing that the host did.

    ``compute``: ``amount`` operations of ``name`` on ``stream``. ``send``: collective
    number ``key`` of ``amount`` bytes, behind what ``stream`` has; ``wait``: ``stream``
    goes on behind it. ``mark``: what ``stream`` has so far is called ``key``; ``join``:
    ``stream`` goes on behind it; ``block``: the host does.
    """

    kind: str
    stream: int
    name: str = ""
    amount: float = 0.0
    key: int = -1


class Span(NamedTuple):
    """When a computation or a collective ran, in seconds from the start."""

    kind: str
    name: str
    begin: float
    end: float


class Schedule:
    """``events``, in the order of the host; ``names`` of buffers, by their storage."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.names: dict[int, str] = {}
        self.compute_stream = Stream(self)
        self.current = self.compute_stream
        self.keys = 0

    def note(self, kind: str, name: str = "", amount: float = 0.0) -> int:
        """Add an event with a key of its own, which is returned."""
        self.keys += 1
        number = self.current.number
        self.events.append(Event(kind, number, name, amount, self.keys))
        return self.keys

    def send(self, op: str, buffers: Sequence[Tensor], nbytes: float) -> dist.Work:
        """Note a collective."""
        unit = self.names.get(buffers[0].untyped_storage()._cdata, "")
        return _Noted(self, self.note("send", f"{op} {unit}".strip(), nbytes))

    def name_buffers(self, handles: Iterable[FlatParamHandle]) -> None:
        """Call the collectives of our units by the units' names."""
        for handle in handles:
            for region in handle.layout.regions:
                buffers = [region.full.buffer]
                if isinstance(region, TrainableRegion):
                    buffers.append(region.reduce.buffer)
                for buffer in buffers:
                    key = buffer.untyped_storage()._cdata
                    self.names[key] = handle.full_fqn or "root"

    def in_flight(self) -> list[tuple[str, set[str]]]:
        """Per computation, the collectives that were sent before and awaited later."""
        sent: dict[int, str] = {}
        found: list[tuple[str, set[str]]] = []
        for event in self.events:
            if event.kind == "send":
                sent[event.key] = event.name
            elif event.kind == "wait":
                sent.pop(event.key, None)
            elif event.kind == "compute":
                found.append((event.name, set(sent.values())))
        return found

    def times(
        self,
        *,
        operations_per_second: float,
        bytes_per_second: float,
        latency: float = 0.0,
    ) -> list[Span]:
        """When everything ran on such a machine; the host itself takes no time."""
        ready: defaultdict[int, float] = defaultdict(float)
        at: dict[int, float] = {}
        """When a mark was reached or a collective done."""
        host = link = 0.0
        spans: list[Span] = []
        for kind, stream, name, amount, key in self.events:
            begin = max(ready[stream], host)
            if kind == "compute":
                ready[stream] = begin + amount / operations_per_second
                spans.append(Span(kind, name, begin, ready[stream]))
            elif kind == "send":
                begin = max(begin, link)
                at[key] = link = begin + latency + amount / bytes_per_second
                spans.append(Span(kind, name, begin, link))
            elif kind == "mark":
                at[key] = begin
            elif kind == "block":
                host = max(host, at.get(key, 0.0))
            else:
                ready[stream] = max(begin, at.get(key, 0.0))
        return spans


def seconds(spans: Sequence[Span]) -> float:
    """From the start to the last end."""
    return max(span.end for span in spans)


def hidden(spans: Sequence[Span]) -> float:
    """Which part of the time of collectives something was computed in, 0 to 1."""
    busy = [(s.begin, s.end) for s in spans if s.kind == "compute"]
    sent = [(s.begin, s.end) for s in spans if s.kind == "send"]
    total = sum(end - begin for begin, end in sent)
    # One stream computes and one link sends, so neither list overlaps itself.
    both = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in sent
        for first, last in busy
    )
    return both / total if total else 1.0


class _Noted(dist.Work):
    """A collective; waiting for it is an event of the stream that is current then."""

    def __init__(self, schedule: Schedule, key: int) -> None:
        super().__init__()
        self._schedule, self._key = schedule, key

    def is_completed(self) -> bool:
        """Whether the host may rely on it: never, here."""
        return False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order what the current stream is given next behind the collective."""
        number = self._schedule.current.number
        self._schedule.events.append(Event("wait", number, key=self._key))
        return True


class Stream:
    """Stands in for a stream of a GPU; 0 is the one that computes."""

    def __init__(self, schedule: Schedule, *, number: int = 0) -> None:
        self.schedule, self.number = schedule, number

    def _mark(self) -> int:
        self.schedule.keys += 1
        key = self.schedule.keys
        self.schedule.events.append(Event("mark", self.number, key=key))
        return key

    def join(self, key: int) -> None:
        """Go on behind a mark."""
        self.schedule.events.append(Event("join", self.number, key=key))

    def record_event(self, event: Mark | None = None) -> Mark:
        """Mark what this stream was given so far."""
        event = event or Mark(self.schedule)
        event.record(self)
        return event

    def wait_event(self, event: Mark) -> None:
        """Go on behind the event's last record."""
        self.join(event.key)

    def wait_stream(self, other: Stream) -> None:
        """Go on behind all that ``other`` was given."""
        self.join(other._mark())

    def synchronize(self) -> None:
        """Have the host wait."""
        key = self._mark()
        self.schedule.events.append(Event("block", self.number, key=key))


class Mark:
    """Stands in for an event of a GPU, both torch's and ours."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.key = schedule, -1
        self.event = self

    def record(self, stream: Stream | None = None) -> None:
        """Mark what the stream was given so far."""
        self.key = (stream or self.schedule.current)._mark()

    def wait(self, stream: Stream | None = None) -> None:
        """Have the stream go on behind the last record."""
        (stream or self.schedule.current).join(self.key)

    def synchronize(self) -> None:
        """Have the host wait for the last record."""
        number = self.schedule.current.number
        self.schedule.events.append(Event("block", number, key=self.key))

    def query(self) -> bool:
        """Never known to be over."""
        return False


@contextmanager
def on_streams(
    schedule: Schedule, handles: Iterable[FlatParamHandle] = ()
) -> Iterator[None]:
    """Go the way of CUDA: ours with ``handles``, which have not run yet; and torch's.

    Torch's libraries ask ``torch.cpu`` for streams when their tensors are on the CPU;
    ours asks ``comm.device``, once a tree has streams.
    """
    numbers = iter(range(1, 1000))

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        outer, schedule.current = schedule.current, stream
        try:
            yield
        finally:
            schedule.current = outer

    def make_stream(*args: object, **kwargs: object) -> Stream:
        return Stream(schedule, number=next(numbers))

    def current(device: object = None) -> Stream:
        return schedule.current

    for handle in handles:
        handle.events = device_layer.UnitEvents(cast("Any", lambda: Mark(schedule)))
    patches: list[tuple[Any, str, Any]] = [
        (device_layer, "_Stream", make_stream),
        (device_layer, "_live", weakref.WeakSet()),
        (device_layer, "use_stream", use),
        (device_layer, "current_stream", current),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cpu, "Stream", make_stream),
        (torch.cpu, "Event", lambda *a, **k: Mark(schedule)),
        *((module, "stream", use) for module in (torch.cpu, torch.cuda)),
        *((module, "current_stream", current) for module in (torch.cpu, torch.cuda)),
    ]
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(patch.object(target, name, value))
        root = "composable_fsdp.tree.root.make_streams"
        stack.enter_context(patch(root, device_layer.CudaStreams))
        yield


class counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Notes the operations of every matrix product on the current stream."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.schedule = schedule

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``; if it multiplies matrices, note that."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operations: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if operations is not None:
            amount = operations(*args, **kwargs, out_val=result)
            self.schedule.note("compute", str(func), amount)
        return result
