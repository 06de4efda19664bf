"""CUDA streams and events of a root; on CPU, null objects in their place.

Private: ``torch._C._cuda_getDevice``, ``_cuda_getCurrentStream``, ``_cuda_setStream``
(``torch.cuda`` reaches them in more time than a kernel's launch takes),
``peek_interpreter_stack`` and ``_DisableFuncTorch``; checked on torch 2.13 (CPU) and
2.11 (CUDA).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# torch does not annotate these constructors.
_Event: Callable[..., torch.cuda.Event] = torch.cuda.Event
_Stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream


def as_cuda() -> bool:
    """Return whether units and roots on CPU get streams and events, too."""
    # ``tools.fake_world`` puts another function here.
    return False


_known: dict[tuple[int, ...], torch.cuda.Stream] = {}
"""Streams that were current, by what ``torch._C`` tells of a stream."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of ``device``, which has an index."""
    key = torch._C._cuda_getCurrentStream(device.index)
    stream = _known.get(key)
    if stream is None:
        stream = _known[key] = torch.cuda.current_stream(device)
    return stream


class use_stream:  # in lower case as ``torch.cuda.stream``
    """``with use_stream(stream):`` makes ``stream`` current, and its device, too."""

    __slots__ = ("_before", "_elsewhere", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._elsewhere: Any = None  # torch annotates the class of its block in part

    def __enter__(self) -> None:
        stream, index = self._stream, self._stream.device_index
        if torch._C._cuda_getDevice() != index:
            self._elsewhere = torch.cuda.stream(stream)
            self._elsewhere.__enter__()
            return
        self._before = torch._C._cuda_getCurrentStream(index)
        torch._C._cuda_setStream(stream.stream_id, index, stream.device_type)

    def __exit__(self, *error: object) -> None:
        if self._elsewhere is not None:
            self._elsewhere.__exit__(None, None, None)
        else:
            torch._C._cuda_setStream(*self._before)


class Waitable(Protocol):
    """The result of an issued collective."""

    def wait(self) -> object:
        """Order all later work behind the collective."""


class StreamEvent:
    """A CUDA event: recorded on a stream, waited for by the current stream."""

    __slots__ = ("_other", "device", "event")

    def __init__(self, device: torch.device) -> None:
        # Created once and recorded again: a wait refers to the latest record that
        # precedes the wait. Two events by turns, so that the event of an operation
        # (``guard.progress``) stands for this operation until the record after next.
        self.device = device
        self.event, self._other = _Event(), _Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        """Mark the end of the work that ``stream`` has been given so far."""
        self.event, self._other = self._other, self.event
        self.event.record(stream)

    def wait(self) -> None:
        """Make the device's current stream wait for the mark; the CPU does not wait."""
        current_stream(self.device).wait_event(self.event)


class _NoEvent(StreamEvent):
    """The event of a CPU: nothing is ever recorded."""

    __slots__ = ()

    def __init__(self) -> None: ...

    def record(self, stream: object) -> None: ...

    def wait(self) -> None: ...


class UnitEvents:
    """The events and streams of a unit. Each event is recorded again in every step."""

    def __init__(self, new_event: Callable[[], StreamEvent]) -> None:
        self.gather = new_event()
        """End of the unit's all-gather on the gather stream."""
        self.free = new_event()
        """Last use of ``full`` by compute, when the unit was resharded."""
        self.reduce = new_event()
        """End of the unit's reduction on the reduce stream."""
        self.all_reduce = new_event()
        """End of a hybrid unit's all-reduce on the all-reduce stream."""
        self.reduce_writer: torch.cuda.Stream | None = None
        """The stream that first copied gradients into the reduce buffers."""
        self.leaf_streams: tuple[torch.cuda.Stream, ...] = ()
        """The streams on which AccumulateGrad nodes and hooks of full leaves run."""


NO_EVENTS = UnitEvents(_NoEvent)
"""The events of every unit on CPU. Never changed."""


CAPTURES: list[Callable[..., None]] = []
"""Called with ``capturing``: whether a CUDA graph is captured from now on."""


def _note_capture() -> bool:
    """Call ``CAPTURES``; return whether the current stream captures."""
    capturing: bool = torch.cuda.is_current_stream_capturing()
    for note in CAPTURES:
        note(capturing=capturing)
    return capturing


class Streams:
    """The streams of a root on CPU: one order of work, so nothing waits."""

    # On CUDA only: all-gathers, reductions, all-reduces over replicas of sharded units,
    # and what was current when the iteration began.
    gather: torch.cuda.Stream
    reduce: torch.cuda.Stream
    all_reduce: torch.cuda.Stream
    compute: torch.cuda.Stream

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.armed: torch.cuda.Stream | None = None
        """The stream of the last forward that ``runtime.grad_hooks`` has prepared."""
        self.host_waits = True
        """Whether the host waits for the works of collectives, or else streams do."""
        self.reads_host = False
        """Whether all-gathers read host memory, so that optimizers must wait."""
        self.stepped: StreamEvent | None = None
        """End of the last optimizer step, on its stream; ``None`` before the first."""

    def begin_iteration(self) -> bool:
        """Return whether AccumulateGrad nodes may belong to another stream."""
        return False

    def wait_for_caller(self) -> None:
        """Make the gather stream wait for the current stream, which wrote shards."""

    def wait_for_step(self) -> None:
        """Make the gather stream wait for the end of the last step, if any."""

    def synchronize(self) -> None:
        """Make the CPU wait for all work of the side streams."""

    def current(self) -> torch.cuda.Stream:
        """Return the current stream. CUDA only."""
        return current_stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Make ``stream`` current in a block. CUDA only."""
        return use_stream(stream)

    def gradient_streams(self, events: UnitEvents) -> list[torch.cuda.Stream]:
        """Return the streams that write reduce buffers and ``.grad``; none on CPU."""
        return []


class CudaStreams(Streams):
    """The side streams of a root on CUDA, shared by all units below the root.

    ::

        stream    owner of the storage of     allocates and frees after waiting for
        gather    full buffers                the last reader on compute
        gather    reduce buffers              the end of the reduction on reduce
        compute   flat gradients              (freed by the user)
        reduce    outputs of a reduction      compute, which waited for the end of the
                  with another dtype          reduction, or for all-reduce
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.host_waits = False
        # Each storage is allocated and freed while its owner is the current stream,
        # after that stream has waited for the last reader on the other stream. So
        # ``record_stream`` is not needed, and memory use does not depend on timing.
        self.gather = _Stream(device, priority=-1)
        self.reduce = _Stream(device, priority=-1)
        self.all_reduce = _Stream(device, priority=-1)
        self.compute = current_stream(device)
        live_streams().add(self)
        _install_step_hooks()

    def begin_iteration(self) -> bool:
        """Make the gather stream wait for the caller; do as ``Streams`` says."""
        self.compute = current_stream(self.device)
        _note_capture()
        # The optimizer wrote the shards on the caller's stream; the gather stream reads
        # them.
        self.gather.wait_stream(self.compute)
        # ``stream != None`` is False in torch (2.11 to 2.13).
        return self.armed is None or self.armed != self.compute

    def wait_for_caller(self) -> None:
        """Make the gather stream wait for the current stream, which wrote shards."""
        self.gather.wait_stream(current_stream(self.device))

    def wait_for_step(self) -> None:
        """Make the gather stream wait for the end of the last step, if any."""
        # Needed if a backward does not follow its own forward at once: backward through
        # a retained graph, or of the first of two forwards. Waiting for the compute
        # stream instead would also wait for all compute since the step. A stream that
        # captures a CUDA graph cannot wait for an event from before the capture, and
        # need not: the stream joined the capture behind that step.
        if not _note_capture() and self.stepped is not None:
            self.gather.wait_event(self.stepped.event)

    def synchronize(self) -> None:
        """Make the CPU wait for all work of the side streams."""
        # Only offloaded units call this function in a step: at the end of backward,
        # before the host reads gradients.
        self.gather.synchronize()
        self.reduce.synchronize()
        self.all_reduce.synchronize()

    def gradient_streams(self, events: UnitEvents) -> list[torch.cuda.Stream]:
        """Return the streams that write reduce buffers and ``.grad``, current first."""
        # Several, because AccumulateGrad hooks run on the stream of the first forward
        # whose graph is alive, other backward hooks on the stream of the matching
        # forward, and the final callback on the caller's.
        found = [current_stream(self.device)]
        for stream in (self.compute, *events.leaf_streams, events.reduce_writer):
            if stream is not None and stream not in found:
                found.append(stream)
        return found


_live: weakref.WeakSet[Streams] = weakref.WeakSet()
"""All ``Streams`` of this process; the optimizer hooks are global to the process."""


def live_streams() -> weakref.WeakSet[Streams]:
    """Return the streams of this process."""
    # ``tools.fake_world`` puts another function here.
    return _live


@cache
def _install_step_hooks() -> None:
    """Install the optimizer hooks, which are global to the process, once."""
    register_optimizer_step_pre_hook(_wait_for_reads)
    register_optimizer_step_post_hook(_note_step)


def _wait_for_reads(optim: object, args: object, kwargs: object) -> None:
    """Optimizer step pre-hook: wait until no copy reads shards in host memory."""
    # After a backward the wait returns at once: ``finish_d2h_grad_copies`` has waited
    # already. During the capture of a CUDA graph the host may not wait; a captured step
    # belongs to a model without offload.
    for streams in live_streams():
        if streams.reads_host and not torch.cuda.is_current_stream_capturing():
            streams.gather.synchronize()


def _note_step(optim: object, args: object, kwargs: object) -> None:
    """Optimizer step post-hook: record where the step ended, for ``wait_for_step``."""
    # Outside a CUDA graph, no stream can wait for an event that was recorded during
    # capture of the graph.
    live = live_streams()
    if (
        not live
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
    ):
        return
    for streams in live:
        if streams.stepped is None:
            streams.stepped = StreamEvent(streams.device)
        streams.stepped.record(current_stream(streams.device))


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph."""
    # Not ``is_available``, which counts devices: before the first use of CUDA no stream
    # captures.
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used and torch.cuda.is_current_stream_capturing()


def wait_unless_captured(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """Make ``stream`` wait for ``other``, unless only ``stream`` is in a capture."""
    # A stream that captures a CUDA graph cannot wait for a stream outside the capture,
    # such as that of the warm-up, and need not: it joined the capture behind that one.
    if is_capturing():
        with use_stream(other):
            if not is_capturing():
                return
    stream.wait_stream(other)


def copy_async(target: Tensor, source: Tensor) -> None:
    """Issue a copy of ``source``, which must not change until the stream is there."""
    try:
        target.copy_(source, non_blocking=True)
    except RuntimeError:
        if torch._C._functorch.peek_interpreter_stack() is None:
            raise
        # A transform of torch.func refuses in-place writes to tensors from outside the
        # transform. Buffers of this package are constants for the transform, as are
        # weights that only an all-gather writes to.
        with torch._C._DisableFuncTorch():
            target.copy_(source, non_blocking=True)


def outside_transforms(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result]:
    """Decorate a function that makes or replaces tensors of this package."""
    # Inside a transform of torch.func (``jvp``, ``vjp``, ``vmap``) such tensors would
    # be wrappers that are dead after the transform.

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return run


def make_events(device: torch.device) -> UnitEvents:
    """Return events for a unit on a CUDA device, ``NO_EVENTS`` on any other device."""
    has_streams = device.type == "cuda" or as_cuda()
    return UnitEvents(partial(StreamEvent, device)) if has_streams else NO_EVENTS


def make_streams(device: torch.device) -> Streams:
    """Return side streams for a CUDA device, the null object for any other device."""
    has_streams = device.type == "cuda" or as_cuda()
    return CudaStreams(device) if has_streams else Streams(device)
