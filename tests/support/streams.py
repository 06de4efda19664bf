"""Going the way of CUDA on CPU tensors, and checking that streams are ordered::

    with fake_world(4), stream_order() as order:
        model = fully_shard(build())     # built inside, so that it gets streams
        step(model)
    assert order.problems == []

Every op is noted with its stream, what it reads and what it writes. Two accesses of the
same bytes, one of them a write, must be ordered by events; a block may be handed out
again only behind everything that used it. The host is a stream, too.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import composable_fsdp
from composable_fsdp.comm import device as device_layer
from composable_fsdp.flat import build, gradients
from composable_fsdp.flat import handle as handle_layer
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.runtime import (
    backward,
    grad_hooks,
    graph_task,
    offload,
    unshard,
)

_PACKAGE = os.path.dirname(composable_fsdp.__file__)
Link = weakref.ref[TrainableRegion]
"""What the hook of a leaf has of its region."""

Clock = dict["FakeStream", int]
"""How many ops of each stream are known to be done."""

_WRITTEN: dict[str, tuple[int, ...]] = {
    "_allgather_base_": (0,),
    "allgather_into_tensor_coalesced_": (0,),
    "_reduce_scatter_base_": (0,),
    "reduce_scatter_tensor_coalesced_": (0,),
    "allreduce_": (0,),
    "allreduce_coalesced_": (0,),
    "broadcast_": (0,),
    "allgather_": (0,),
    "gather_": (0,),
    "scatter_": (0,),
}
"""Which arguments a collective writes: its schema does not say."""


class Access(NamedTuple):
    """One op on some bytes of a storage."""

    stream: FakeStream
    time: int
    start: int
    stop: int
    writes: bool
    where: str
    clock: Clock
    """What the stream knew then."""


class Block:
    """What is known of a storage."""

    def __init__(self, owner: FakeStream) -> None:
        self.owner = owner
        self.accesses: dict[tuple[Any, ...], Access] = {}
        self.is_host = False
        self.is_recorded = False
        """The engine told the allocator of the second stream that uses it."""


class FakeStream:
    """A stream whose clock knows what comes before the next op on it."""

    def __init__(self, order: StreamOrder, name: str) -> None:
        self.order, self.name = order, name
        self.clock: Clock = {}

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        """As ``torch.Stream``, which is neither equal to None nor different from it."""
        return other is not None and self is not other

    def __hash__(self) -> int:
        return id(self)

    def wait_event(self, event: FakeEvent) -> None:
        """What comes next is behind the latest record of ``event``."""
        if self.order.capturing and not event.is_captured:
            self.order.report(
                f"{self} waits in {_place()} for an event from before the capture"
            )
        if event.is_captured and not self.order.capturing:
            self.order.report(
                f"{self} waits in {_place()} for an event from inside the capture"
            )
        if event.is_captured:
            self.order.captured.add(self)
        if event.clock is None:
            self.order.report(f"{self} waits for an event that was never recorded")
        else:
            self.join(event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        """What comes next is behind all that ``other`` was given."""
        captured = self.order.captured
        if other in captured:
            captured.add(self)
        elif self in captured:
            self.order.report(
                f"{self} waits in {_place()} for {other}, which is not in the capture"
            )
        self.join(other.clock)

    def synchronize(self) -> None:
        """The host is behind all that this stream was given."""
        if self.order.capturing:
            self.order.report(
                f"the host waits for {self} in {_place()} while it captures"
            )
        self.order.host.join(self.clock)

    def join(self, clock: Clock) -> None:
        """Come behind what ``clock`` knows of."""
        for stream, time in clock.items():
            self.clock[stream] = max(time, self.clock.get(stream, 0))

    def has_seen(self, access: Access) -> bool:
        """Whether the next op is behind ``access``."""
        return access.stream is self or self.clock.get(access.stream, 0) >= access.time


class FakeEvent:
    """What a stream knew when the event was recorded."""

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.is_captured = False
        """Whether the latest record is part of a CUDA graph."""

    def record(self, stream: FakeStream) -> None:
        """Remember what ``stream`` has been given so far."""
        self.is_captured = stream in stream.order.captured
        self.clock = dict(stream.clock)


class StreamOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """``problems``: what was not ordered, one text per pair of places."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[str] = []
        self.host = FakeStream(self, "host")
        self.compute = FakeStream(self, "compute")
        self.leaf_streams: dict[int, FakeStream] = {}
        """By identity of a full leaf, where its hook runs: where the node that
        accumulates was made."""
        self.current = self.compute
        self.is_async = False
        self.captured: set[FakeStream] = set()
        """The streams whose work goes into a CUDA graph: no wait may reach back before
        it. A stream joins them by a wait for one of them."""
        self._blocks: dict[int, tuple[Any, Block]] = {}
        self._freed: dict[FakeStream, list[Access]] = {}

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return bool(self.captured)

    def current_captures(self) -> bool:
        """Whether the work of the current stream goes into a CUDA graph."""
        return self.current in self.captured

    def report(self, text: str) -> None:
        """Note a problem, once."""
        if text not in self.problems:
            self.problems.append(text)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Make ``stream`` current."""
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def block(self, storage: torch.UntypedStorage, *, made: bool = False) -> Block:
        """The block of ``storage``; one that an op just made belongs to its stream."""
        key = storage._cdata
        known = self._blocks.get(key)
        if known is not None and known[0]() is not None:
            return known[1]
        block = Block(self.current if made else self.compute)
        if made:
            self.allocate(block)
        forget = partial(self._forget, key, block)
        self._blocks[key] = weakref.ref(storage, forget), block
        return block

    def allocate(self, block: Block) -> None:
        """Hand out memory to the current stream: it may be any block freed on it."""
        block.owner = self.current
        for access in self._freed.pop(self.current, ()):
            if not self.current.has_seen(access):
                self.report(
                    f"{self.current} may reuse memory in {_place()} that is used by "
                    f"{access.stream} in {access.where}"
                )

    def hand_out(self, block: Block, nbytes: int) -> None:
        """Other streams may use the block behind its allocation only."""
        stream, where = self.current, _place()
        time = stream.clock[stream] = stream.clock.get(stream, 0) + 1
        block.accesses[stream, 0, nbytes, True] = Access(
            stream, time, 0, nbytes, True, where, dict(stream.clock)
        )

    def free(self, block: Block) -> None:
        """Give the memory back to the stream it was allocated on."""
        if not block.is_host and not block.is_recorded:
            self._freed.setdefault(block.owner, []).extend(block.accesses.values())
        block.accesses.clear()

    def _forget(self, key: int, block: Block, gone: object) -> None:
        if key in self._blocks and self._blocks[key][0] is gone:
            del self._blocks[key]
        self.free(block)

    def access(self, stream: FakeStream, tensor: Tensor, *, writes: bool) -> None:
        """Note that the op which ``stream`` runs now uses ``tensor``."""
        if not tensor.numel():
            return
        block = self.block(tensor.untyped_storage())
        start = int(tensor.storage_offset())
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + 1 + sum(int((size - 1) * stride) for size, stride in pairs)
        start, stop = start * tensor.itemsize, stop * tensor.itemsize
        where = _place()
        for other in block.accesses.values():
            if (
                (writes or other.writes)
                and other.start < stop
                and start < other.stop
                and not stream.has_seen(other)
            ):
                self.report(
                    f"{stream} {'writes' if writes else 'reads'} in {where} what "
                    f"{other.stream} {'writes' if other.writes else 'reads'} in "
                    f"{other.where}"
                )
        clock = dict(stream.clock)
        block.accesses[stream, start, stop, writes] = Access(
            stream, clock[stream], start, stop, writes, where, clock
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and note what it would do on its stream."""
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        result = func(*args, **kwargs)
        made = _tensors(result)
        storages = {t.untyped_storage()._cdata for t in given}
        written = _written(func, args, kwargs)
        fresh = [t for t in made if t.untyped_storage()._cdata not in storages]
        if not written and not fresh and made:
            return result  # a view
        on_host = [self.block(t.untyped_storage()).is_host for t in given]
        sends = func.name().startswith("c10d::")
        blocks = any(on_host) and not self.is_async
        # Groups send from the device, so a shard on the host is copied there and back.
        stream = self.host if blocks and all(on_host) and not sends else self.current
        stream.join(self.host.clock)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        for tensor in fresh:
            self.block(tensor.untyped_storage(), made=True).is_host = (
                stream is self.host
            )
        writes = {id(t) for t in (*written, *fresh)}
        for tensor in (*given, *fresh):
            self.access(stream, tensor, writes=id(tensor) in writes)
        if blocks or func.name() == "aten::_local_scalar_dense":
            self.host.join(stream.clock)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    name = func.name().split("::")[1].split(".")[0]
    if func.name().startswith("c10d::"):
        return _tensors([args[i] for i in _WRITTEN[name]])
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _place() -> str:
    """The innermost functions of the package that led here, outermost last."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(names) < 3:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]  # checked by the loop
    return " < ".join(names) or "the model"


@contextmanager
def stream_order() -> Iterator[StreamOrder]:
    """Give trees that are built in the block streams of ours, and watch them."""
    order = StreamOrder()
    with ExitStack() as stack:
        for target, name, value in _patches(order):
            stack.enter_context(patch.object(target, name, value))
        with order:
            yield order


Patches = list[tuple[Any, str, Any]]
"""Module or class, name, and what stands there while an order watches."""


def _patches(order: StreamOrder) -> Patches:
    return [*_of_streams(order), *_of_memory(order), *_of_autograd(order)]


def _of_streams(order: StreamOrder) -> Patches:
    """Streams and events, also of trees and units on the CPU."""
    names = iter(["gather", "reduce", "all_reduce"] * 100)

    def make_stream(device: torch.device, priority: int) -> FakeStream:
        return FakeStream(order, next(names))

    def make_events(device: torch.device) -> device_layer.UnitEvents:
        return device_layer.UnitEvents(partial(device_layer.StreamEvent, device))

    def current_stream(device: object = None) -> FakeStream:
        return order.current

    make: Callable[[torch.device], Any] = device_layer.CudaStreams
    return [
        (device_layer, "use_stream", order.on),
        (device_layer, "current_stream", current_stream),
        (torch.cuda, "stream", order.on),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "is_current_stream_capturing", order.current_captures),
        (device_layer, "is_capturing", order.current_captures),
        (device_layer, "_live", weakref.WeakSet()),
        (device_layer, "_Event", FakeEvent),
        (device_layer, "_Stream", make_stream),
        (sys.modules["composable_fsdp.tree.root"], "make_streams", make),
        (handle_layer, "make_events", make_events),
    ]


def _of_memory(order: StreamOrder) -> Patches:
    """Where memory is given and taken, and where it is the host's."""
    resize = torch.UntypedStorage.resize_
    new_shard = gradients.new_shard

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        block = order.block(storage)
        if nbytes:
            order.allocate(block)
            order.hand_out(block, nbytes)
        else:
            order.free(block)
        return resize(storage, nbytes)

    def host_shard(
        numel: int, dtype: torch.dtype, device: torch.device, *, offload: bool
    ) -> Tensor:
        shard = new_shard(numel, dtype, device, offload=offload)
        block = order.block(shard.untyped_storage())
        block.is_host = offload
        block.accesses.clear()  # nobody has seen it yet
        return shard

    def copy_async(target: Tensor, source: Tensor) -> None:
        order.is_async = True
        target.copy_(source)
        order.is_async = False

    return [
        (torch.UntypedStorage, "resize_", resize_),
        (build, "new_shard", host_shard),
        (gradients, "new_shard", host_shard),
        (offload, "copy_async", copy_async),
        (unshard, "copy_async", copy_async),
    ]


def _of_autograd(order: StreamOrder) -> Patches:
    """Nodes of leaves run on the stream they were made on."""
    arrival, accumulators = backward.make_grad_hook, grad_hooks.accumulators_of
    finish = graph_task.finish_task
    ran: set[FakeStream] = set()

    def arrival_there(index: int) -> Callable[[Link, Tensor], None]:
        def arrive_there(link: Link, leaf: Tensor) -> None:
            # A node that has a stream of its own is run behind the op that gave it the
            # gradient, and the allocator knows.
            stream = order.leaf_streams[id(leaf)]
            ran.add(stream)
            if leaf.grad is not None and stream is not order.current:
                block = order.block(leaf.grad.untyped_storage())
                block.is_recorded = True
                for access in block.accesses.values():
                    stream.join(access.clock)
            with order.on(stream):
                arrival(index)(link, leaf)

        return arrive_there

    def note_stream(leaves: Any) -> object:
        nodes = accumulators(leaves)
        for leaf, node in zip(leaves, nodes, strict=True):
            # The stream of the node, which a living graph may have kept.
            stream = node.metadata.setdefault("order.stream", order.current)
            order.leaf_streams[id(leaf)] = stream
        return nodes

    def finish_behind_leaves(*args: Any) -> None:
        for stream in ran:
            order.current.wait_stream(stream)
        ran.clear()
        finish(*args)

    return [
        (grad_hooks, "make_grad_hook", arrival_there),
        (grad_hooks, "accumulators_of", note_stream),
        (graph_task, "finish_task", finish_behind_leaves),
    ]
