"""``MemoryLog``: the storages and the costs of the operations of a simulated step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.comm.ranges import running_unit
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.tools.memory import Memory, StepMoment
from composable_fsdp.tools.simulated_clock import Clock
from composable_fsdp.tools.storages import StorageLog

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


class MemoryLog(StorageLog):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows storages and costs of all operations in the block."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._before = Memory()

    def ran(
        self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]
    ) -> None:
        """Note the time of an operation: arithmetic or memory, the slower."""
        name: str = func._schema.name
        # Views move nothing, and allocations write nothing.
        if func.is_view or name.startswith(_FREE):
            return
        machine, stage = self._clock.machine, self._clock.stage
        seconds = sum(t.nbytes for t in tensors) / machine.memory_bytes_per_second
        # Imported here: the module loads others that training does not need.
        from torch.utils.flop_counter import flop_registry

        # torch counts matrix products, convolutions and attention.
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            operations = float(count(*args, **kwargs, out_val=result))
            seconds = max(seconds, operations / machine.operations_per_second)
        if seconds:
            self._clock.compute(running_unit(stage), seconds)

    def new_kind(self) -> str:
        """Return the kind of a storage that is made now."""
        # Operations of a forward record a graph, also those that checkpointing repeats
        # in backward; other operations do not.
        recorded = torch.is_grad_enabled() and self._clock.stage != "optimizer step"
        return "activations" if recorded else "temporaries"

    def here(self) -> tuple[float, str]:
        """Return the time, and the part of the step."""
        stage = self._clock.stage
        unit = running_unit(stage)
        # The stage alone names moments between units.
        when = stage if unit is None else f"{stage} of {unit or ROOT_NAME}"
        return self._clock.seconds, when

    def restart(self) -> None:
        """Forget all changes so far; live storages are there from the start."""
        self.changes.clear()
        # The first step has made the storages that stay.
        before = Memory().by_kind()
        for block in self.blocks.values():
            before[block.kind] += block.nbytes
        self._before = Memory._make([*before.values(), "start"])

    def timeline(self) -> Iterator[StepMoment]:
        """Yield the memory at the start and behind the changes since ``restart``."""
        # Kinds are read here, after the last call of ``mark``.
        now = self._before.by_kind()
        yield StepMoment(self._before)
        latest = 0.0
        following = [*((c.at, c.more > 0) for c in self.changes[1:]), None]
        for (block, more, at), later in zip(self.changes, following, strict=True):
            now[block.kind] += more
            # Of changes at the same time, those that end a row of allocations or of
            # frees: no maximum is left out.
            if later == (at, more > 0):
                continue
            # The host runs ahead of streams: its order is kept where times go back.
            latest = max(latest, at[0])
            yield StepMoment(Memory._make([*now.values(), at[1]]), seconds=latest)
