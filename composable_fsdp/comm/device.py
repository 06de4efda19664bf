"""Streams and events on CUDA; nothing at all on CPU.

Overlap comes from two side streams of our own: one gathers, one reduces. On CPU there
are no streams: collectives are issued with ``async_op=True`` and their ``Work`` is
waited for where CUDA waits for an event. The CPU waits for the GPU only where shards
are offloaded: once a step in ``synchronize``, and in front of an optimizer that comes
when no backward has waited.

Checked on torch 2.13 (CPU); the CUDA calls are the public ``torch.cuda`` ones. Private:
``torch._C._functorch.peek_interpreter_stack`` and ``torch._C._DisableFuncTorch``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# torch does not annotate these constructors.
_Event: Callable[..., torch.cuda.Event] = torch.cuda.Event
_Stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream


class Waitable(Protocol):
    """What an issued collective leaves: call ``wait`` before reading its result."""

    def wait(self) -> object:
        """Order everything after this call behind the collective."""


class StreamEvent:
    """A CUDA event that is recorded on one stream and waited for by the current one.

    Made once and recorded again each time: a wait refers to the latest record before
    it.
    """

    __slots__ = ("device", "event")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.event = _Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        """Mark the work that ``stream`` has been given so far."""
        self.event.record(stream)

    def wait(self) -> None:
        """Make the current stream of the device wait; the CPU goes on."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class Streams:
    """The side streams of one root, shared by all units below it.

    ``gather`` owns the storage of full buffers and ``compute`` that of reduce buffers:
    each is allocated and freed with that stream current, after it has waited for the
    last reader on the other stream. So no ``record_stream`` is needed and memory does
    not depend on timing.
    """

    __slots__ = (
        "__weakref__",
        "compute",
        "device",
        "gather",
        "reads_host",
        "reduce",
        "stepped",
    )

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gather = _Stream(device, priority=-1)
        self.reduce = _Stream(device, priority=-1)
        self.compute = torch.cuda.current_stream(device)
        self.reads_host = False
        """Whether gathers read shards on the host, for which optimizers then wait."""
        self.stepped: StreamEvent | None = None
        """Where the last step of an optimizer ended, on the stream it ran on."""
        _watch_steps(self)


_live: weakref.WeakSet[Streams] = weakref.WeakSet()
_watching = False


def _watch_steps(streams: Streams) -> None:
    global _watching
    _live.add(streams)
    if not _watching:
        register_optimizer_step_pre_hook(_wait_for_reads)
        register_optimizer_step_post_hook(_note_step)
        _watching = True


def _wait_for_reads(optim: object, args: object, kwargs: object) -> None:
    # After a backward there is nothing left to wait for.
    for streams in _live:
        if streams.reads_host:
            streams.gather.synchronize()


def _note_step(optim: object, args: object, kwargs: object) -> None:
    # An event of a graph that is being captured cannot be waited for outside.
    if (
        not _live
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
    ):
        return
    for streams in _live:
        if streams.stepped is None:
            streams.stepped = StreamEvent(streams.device)
        streams.stepped.record(torch.cuda.current_stream(streams.device))


def wait_for_step(streams: Streams) -> None:
    """Order gathers behind the last step of an optimizer, if there was one.

    For a backward that does not follow its forward at once: one whose graph was kept,
    or that of the first of two forwards. It waits for no compute since the step.
    """
    if streams.stepped is not None:
        streams.gather.wait_event(streams.stepped.event)


def copy_async(target: Tensor, source: Tensor) -> None:
    """Issue a copy on the current stream; the CPU goes on.

    Between pinned host memory and a device it is done when the stream gets there, and
    ``source`` must stay as it is until then. A change of dtype happens on the device.
    """
    try:
        target.copy_(source, non_blocking=True)
    except RuntimeError:
        if torch._C._functorch.peek_interpreter_stack() is None:
            raise
        # A transform of torch.func refuses writes to tensors that it did not make. Ours
        # are constants to it, as weights are that a gather alone writes to.
        with torch._C._DisableFuncTorch():
            target.copy_(source, non_blocking=True)


def synchronize(streams: Streams | None) -> None:
    """Make the CPU wait for everything that the side streams were given."""
    if streams is not None:
        streams.gather.synchronize()
        streams.reduce.synchronize()


def make_streams(device: torch.device) -> Streams | None:
    """Return side streams for a CUDA device, ``None`` for any other."""
    return Streams(device) if device.type == "cuda" else None
