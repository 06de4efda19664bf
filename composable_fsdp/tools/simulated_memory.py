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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.comm.ranges import running_unit
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.tools.simulated_world import Machine, replaced_here
from composable_fsdp.tools.storages import Block, StorageMode
from composable_fsdp.tools.timetable import COMPUTE, Label, Timetable


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


class SimulatedMoment(NamedTuple):
    """The memory at a moment of a step.

    Args:
        seconds: time since the start of the step.
        when: the part of the step, as "backward of blocks.3".
        memory: live bytes by kind.
    """

    seconds: float
    when: str
    memory: LiveMemory


class MemoryLog(StorageMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows storages and costs of all operations in the block."""

    def __init__(self, table: Timetable, machine: Machine) -> None:
        super().__init__()
        self._table, self._machine = table, machine
        self._changes: list[Change] = []
        self._before = LiveMemory()
        self._resize: Any = None

    def _ran(
        self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]
    ) -> None:
        """Note the cost of an operation."""
        seconds = self._seconds(func, args, kwargs, result, tensors)
        # Operations before the first unit have no unit in their label.
        if seconds:
            self._table.compute(self.label(), seconds)

    def label(self) -> Label:
        """Return the stage, and the unit that is running, if any."""
        return Label(self._table.stage, running_unit(self._table.stage))

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
        # Imported here: the module loads others that training does not need.
        from torch.utils.flop_counter import flop_registry

        # torch counts matrix products, convolutions and attention.
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return moved
        operations = count(*args, **kwargs, out_val=result)
        return max(moved, float(operations) / machine.operations_per_second)

    def _new_kind(self) -> str:
        """Return the kind of a storage that is made now."""
        # Operations of a forward record a graph, also those that checkpointing repeats
        # in backward; other operations do not.
        recorded = torch.is_grad_enabled() and self._table.stage != "optimizer step"
        return "activations" if recorded else "temporaries"

    def _note(self, block: Block, more: int) -> None:
        """Note when a storage has changed its size."""
        events = self._table.events
        offset = events[-1].seconds if events else 0.0
        change = Change(block, more, len(events) - 1, offset, self.label())
        self._changes.append(change)

    def restart(self) -> None:
        """Forget all changes so far; live storages are there from the start."""
        self._changes.clear()
        # The first step has made the storages that stay.
        before: dict[str, int] = {}
        for block in self._blocks.values():
            before[block.kind] = before.get(block.kind, 0) + block.nbytes
        self._before = LiveMemory(**before)

    def timeline(self, begins: Sequence[float]) -> Iterator[SimulatedMoment]:
        """Yield the memory at the start and behind the changes since ``restart``.

        ``begins`` are the times of the events. Of several changes at the same time only
        those are there that end a row of allocations or of frees, so no maximum is left
        out.
        """
        # Kinds are read here, after the last call of ``mark``.
        now = self._before.by_kind()
        # The start is before all events.
        yield SimulatedMoment(0.0, "start", self._before)
        latest = 0.0
        for index, (block, more, event, offset, label) in enumerate(self._changes):
            now[block.kind] += more
            later = self._changes[index + 1 : index + 2]
            if [(*each[2:], each.more > 0) for each in later] == [
                (event, offset, label, more > 0)
            ]:
                continue
            at = begins[event] if event >= 0 else 0.0
            # Memory of a collective is there when the collective begins.
            computes = event >= 0 and self._table.events[event].kind == COMPUTE
            # The host runs ahead of streams: its order is kept where times go back.
            latest = max(latest, at + (offset if computes else 0.0))
            # The stage alone names moments between units.
            of = "" if label.unit is None else f" of {label.unit or ROOT_NAME}"
            memory = replace(self._before, **now)
            yield SimulatedMoment(latest, label.name + of, memory)

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
        self._resize = replaced_here(torch.UntypedStorage, "resize_", resize_)
        # A mode is its own context manager, so the replacement is entered by hand.
        self._resize.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._resize.__exit__(None, None, None)


_FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::_local",
    "profiler::",
    "_c10d_functional::",
)
"""Beginnings of the names of operations that take no time on the device; collectives
take the time of a link."""
