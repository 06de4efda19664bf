"""``MemoryLog``: the storages of a simulated step, from first operation to end.

A storage may be allocated before its kind is known (a gradient is any tensor until a
parameter shows it), so changes refer to storages, and storages are named
later::

    operation --> Change(block, +bytes, position in the timetable)
    mark(tensor, "gradients") --> block.kind
    timeline() --> bytes by kind, behind each change

Memory that a kernel allocates and frees itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp.comm.ranges import OPEN
from composable_fsdp.comm.simulated_world import Machine, replaced
from composable_fsdp.comm.timetable import Label, Timetable


@cache
def _flop_registry() -> dict[Any, Any]:
    """Return torch's functions that count the operations of an operator."""
    # Imported at the first use: the module loads others that training does not need.
    from torch.utils.flop_counter import flop_registry

    return flop_registry


@dataclass(frozen=True, slots=True)
class LiveMemory:
    """Live bytes of a rank at a moment of a simulated step, by kind.

    Args:
        parameters: sharded parameters, and parameters that no unit holds.
        buffers: buffers of the modules.
        gradients: sharded gradients.
        optimizer: states of the optimizer.
        full: full parameters, in use or gathered ahead.
        reduce: buffers of reductions.
        activations: the batch, and tensors of the forward that are not freed yet.
        temporaries: tensors of backward, clipping and the optimizer, such as gradients
            that are not reduced yet.
        host: shards, gradients and states of offloaded units, in the order of CUDA; in
            host memory, and so not in ``total``.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    full: int = 0
    reduce: int = 0
    activations: int = 0
    temporaries: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Sum of all bytes on the device."""
        return sum(self.by_kind().values()) - self.host

    def by_kind(self) -> dict[str, int]:
        """Return the bytes by the name of the field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Block:
    """A storage."""

    __slots__ = ("__weakref__", "kind", "link", "nbytes")

    def __init__(self, kind: str) -> None:
        self.kind, self.nbytes = kind, 0
        self.link: weakref.ref[torch.UntypedStorage] | None = None


class Change(NamedTuple):
    """A change of the size of a block.

    Args:
        block: the block.
        more: bytes that were allocated; negative if they were freed.
        event: index of the event of the timetable in which this happened.
        offset: seconds of the event that were over.
        label: the part of the step that was running.
    """

    block: Block
    more: int
    event: int
    offset: float
    label: Label


class Moment(NamedTuple):
    """The memory behind a change: index of the event, offset in it, label, bytes."""

    event: int
    offset: float
    label: Label
    memory: LiveMemory


class MemoryLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows storages and costs of all operations in the block."""

    def __init__(self, table: Timetable, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table, self._machine = table, machine
        self._blocks: dict[int, Block] = {}
        self._changes: list[Change] = []
        self._before = LiveMemory()
        self._resize: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, note its cost, and follow the storages that it meets."""
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            # Logging of a loss, steps of optimizers: a number that nobody knows is 1.
            if func.name() not in _NUMBERS:
                raise
            result = _one(args[0])
        tensors = [
            each
            for each in pytree.tree_leaves((args, kwargs, result))
            # A wrapper, such as a DTensor, has no memory of its own.
            if isinstance(each, Tensor) and not hasattr(each, "__tensor_flatten__")
        ]
        seconds = self._seconds(func, args, kwargs, result, tensors)
        # Operations before the first unit have no unit in their label.
        if seconds:
            self._table.compute(self.label(), seconds)
        # A tensor on meta has no memory on any device.
        for tensor in tensors:
            if tensor.device.type != "meta":
                self._meet(tensor)
        return result

    def label(self) -> Label:
        """Return the stage, and the unit that is running, if any."""
        # Checkpointing runs forwards in backward, whose ranges are inside.
        for kind in dict.fromkeys((self._table.stage, "forward", "backward")):
            for (each, _), ranges in OPEN.items():
                if each == kind and ranges:
                    return Label(self._table.stage, ranges[-1].unit)
        return Label(self._table.stage, None)

    def _seconds(
        self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]
    ) -> float:
        """Return how long the operation takes: arithmetic or memory, the slower."""
        name: str = func._schema.name
        # Views move nothing, and allocations write nothing.
        if func.is_view or name.startswith(_FREE):
            return 0.0
        machine = self._machine
        moved = sum(t.nbytes for t in tensors) / machine.memory_bytes_per_second
        # torch counts matrix products, convolutions and attention.
        count = _flop_registry().get(func._overloadpacket)
        if count is None:
            return moved
        operations = count(*args, **kwargs, out_val=result)
        return max(moved, float(operations) / machine.operations_per_second)

    def _meet(self, tensor: Tensor) -> Block:
        """Return the block of a tensor, with the storage's size of now."""
        storage = tensor.untyped_storage()
        # An address may be used again by a later storage; the link tells.
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None or block.link is None or block.link() is None:
            # Operations of a forward record a graph, also those that checkpointing
            # repeats in backward; other operations do not.
            recorded = torch.is_grad_enabled() and self._table.stage != "optimizer step"
            block = Block("activations" if recorded else "temporaries")
            block.link = weakref.ref(storage, partial(self._forget, key, block))
            self._blocks[key] = block
        self._change(block, storage.nbytes())
        return block

    def _forget(self, key: int, block: Block, gone: object) -> None:
        """Note that a storage is freed."""
        self._change(block, 0)
        # A later storage may be at the same address already.
        if self._blocks.get(key) is block:
            del self._blocks[key]

    def _change(self, block: Block, nbytes: int) -> None:
        """Note the size of a block, if it has changed."""
        more = nbytes - block.nbytes
        # Most operations meet storages that are known, and change none.
        if more:
            block.nbytes = nbytes
            events = self._table.events
            offset = events[-1].seconds if events else 0.0
            self._changes.append(
                Change(block, more, len(events) - 1, offset, self.label())
            )

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say of which kind the storages of ``tensors`` are, also in hindsight."""
        for tensor in tensors:
            if tensor is not None:
                # Changes refer to the block, so earlier changes get the kind, too.
                self._meet(tensor).kind = kind

    def restart(self) -> None:
        """Forget all changes so far; live storages are there from the start."""
        self._changes.clear()
        # The first step has made the storages that stay.
        before: dict[str, int] = {}
        for block in self._blocks.values():
            before[block.kind] = before.get(block.kind, 0) + block.nbytes
        self._before = LiveMemory(**before)

    def timeline(self) -> list[Moment]:
        """Return the memory at the start and behind the changes since ``restart``.

        Of several changes at the same time only those are there that end a row of
        allocations or of frees, so no maximum is left out.
        """
        # Kinds are read here, after the last call of ``mark``.
        now = self._before.by_kind()
        # The start is before all events.
        found = [Moment(-1, 0.0, Label("start", None), self._before)]
        for index, change in enumerate(self._changes):
            now[change.block.kind] += change.more
            later = self._changes[index + 1 : index + 2]
            same = [(c.event, c.offset, c.label, c.more > 0) for c in later]
            if same == [(*change[2:], change.more > 0)]:
                continue
            found.append(Moment(*change[2:], replace(self._before, **now)))
        return found

    def __enter__(self) -> MemoryLog:
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = plain(storage, nbytes)
            # A storage that no operation has met is none of the step.
            block = self._blocks.get(storage._cdata)
            if block is not None:
                self._change(block, nbytes)
            return result

        # A resize is no operation of torch's dispatcher.
        self._resize = replaced(torch.UntypedStorage, "resize_", resize_)
        # A mode is its own context manager, so the replacement is entered by hand.
        self._resize.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._resize.__exit__(None, None, None)


_NUMBERS = {"aten::_local_scalar_dense", "aten::equal"}
"""Operations whose result is a number that depends on values."""

_FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_local", "profiler::")
"""Beginnings of the names of operations that take no time on the device."""


def _one(tensor: Tensor) -> float | complex:
    """Return 1 as a number of the kind of ``tensor``; of booleans, True."""
    # A condition that is true goes the way of a finite loss, for example.
    if tensor.dtype is torch.bool:
        return True
    if tensor.dtype.is_complex:
        return 1 + 0j
    return 1.0 if tensor.dtype.is_floating_point else 1
