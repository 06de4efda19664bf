"""``Simulation``: the memory and the schedule of a simulated step, and its trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from composable_fsdp.naming import ROOT_NAME, size_text
from composable_fsdp.tools.machine import Machine
from composable_fsdp.tools.memory import StepMoment
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.simulated_clock import (
    COMMUNICATION,
    COMPUTE,
    SimulatedOperation,
)
from composable_fsdp.tools.texts import counted


@dataclass(frozen=True)
class Simulation:
    """A training step of a rank that was simulated; ``print()`` shows a summary.

    Args:
        plan: the plan of the model that was simulated, for ``forecast``.
        device_type: "cuda" or "cpu": the order in which memory is freed.
        optimizer: the name of the optimizer.
        machine: the speeds that the times are for.
        timeline: the live bytes, through the step.
        operations: computations and collectives, in the order of the host.
        world_size: number of ranks in all; ``plan.world_size`` has the ranks over which
            the root is sharded.
    """

    plan: ShardingPlan
    device_type: str
    optimizer: str
    machine: Machine
    timeline: tuple[StepMoment, ...]
    operations: tuple[SimulatedOperation, ...]
    world_size: int

    @cached_property
    def peak(self) -> StepMoment:
        """The first moment with most bytes on the device."""
        return max(self.timeline, key=lambda moment: moment.memory.total)

    @property
    def collectives(self) -> tuple[SimulatedOperation, ...]:
        """The collectives, in the order in which they are sent."""
        return tuple([o for o in self.operations if o.kind == COMMUNICATION])

    @property
    def seconds(self) -> float:
        """How long the step takes on ``machine``."""
        return max((each.end for each in self.operations), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds in which the stream of the program computes nothing."""
        busy = [o for o in self.operations if o.kind == COMPUTE and o.stream == 0]
        # A stream computes one thing at a time, so lengths add up.
        return self.seconds - sum(each.end - each.begin for each in busy)

    def __str__(self) -> str:
        sent: dict[str, list[int]] = {}
        for each in self.collectives:
            sent.setdefault(each.name, []).append(each.nbytes)
        lines = [
            f"step of {counted(len(self.plan.units), 'unit')} on "
            f"{counted(self.world_size, 'rank')}, in the order of {self.device_type}, "
            f"optimizer {self.optimizer}",
            f"peak per rank: {size_text(self.peak.memory.total)} in {self.peak.when}",
        ]
        kinds = _kinds(self.peak)
        width = max(map(len, kinds))
        lines += [
            f"  {kind:<{width}}  {size_text(size):>12}"
            for kind, size in kinds.items()
            if size
        ]
        words = [
            f"{len(sizes)} x {op} of {size_text(sum(sizes))} in all"
            for op, sizes in sent.items()
        ]
        lines.append(f"collectives: {', '.join(words) or 'none'}")
        lines.append(
            f"time on the assumed machine: {1e3 * self.seconds:.3g} ms, of which "
            f"{1e3 * self.exposed:.3g} ms wait for collectives"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the simulation as numbers, for JSON."""
        names = "phase group ranks begin end"
        return {
            "world_size": self.world_size,
            "data_ranks": self.plan.world_size,
            "device_type": self.device_type,
            "optimizer": self.optimizer,
            "peak": {
                "when": self.peak.when,
                "bytes": self.peak.memory.total,
                "by_kind": _kinds(self.peak),
            },
            "seconds": self.seconds,
            "exposed_seconds": self.exposed,
            "collectives": [
                {"op": each.name, "unit": each.unit, "bytes": each.nbytes}
                | {name: getattr(each, name) for name in names.split()}
                for each in self.collectives
            ],
            "timeline": [
                {"seconds": each.seconds, "when": each.when, **_kinds(each)}
                for each in self.timeline
            ],
        }

    def trace(self) -> dict[str, Any]:
        """Return the step in Chrome's trace format, as a dict for ``json``."""
        return {
            "displayTimeUnit": "ms",
            "otherData": {
                "world_size": self.world_size,
                "device_type": self.device_type,
                "optimizer": self.optimizer,
                "times": f"assumed speeds: {self.machine}",
            },
            "traceEvents": list(self._trace_events()),
        }

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write ``trace()`` to ``path``; https://ui.perfetto.dev opens the file."""
        Path(path).write_text(json.dumps(self.trace()))

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events: operations, names of rows, and bytes by kind."""
        # Both rows are there also if nothing is on them.
        rows = [COMPUTE, COMMUNICATION]
        for each in self.operations:
            row, sent = each.kind, {}
            if each.kind == COMMUNICATION:
                sent = {"bytes": each.nbytes, "group": each.group, "ranks": each.ranks}
            elif each.stream:
                row = f"copies and casts of stream {each.stream}"
            rows += [] if row in rows else [row]
            unit = each.unit if each.unit is None else each.unit or ROOT_NAME
            # A complete event.
            yield {
                "ph": "X",
                "pid": 0,
                "tid": rows.index(row),
                "cat": each.kind,
                "name": each.title,
                "ts": _microseconds(each.begin),
                # By the ends, so that the next event begins where this one ends.
                "dur": _microseconds(each.end, since=each.begin),
                "args": {"unit": unit, "phase": each.phase or each.name, **sent},
            }
        names = [("process_name", 0, f"rank 0 of {self.world_size}")]
        names += [("thread_name", *numbered) for numbered in enumerate(rows)]
        for what, number, name in names:
            about = {"ph": "M", "pid": 0, "tid": number}
            yield {**about, "name": what, "args": {"name": name}}
        # Perfetto stacks the kinds of a counter.
        for moment in self.timeline:
            yield {
                "ph": "C",
                "pid": 0,
                "name": "live bytes",
                "ts": _microseconds(moment.seconds),
                "args": _kinds(moment),
            }


def _kinds(moment: StepMoment) -> dict[str, int]:
    """Return the bytes of the kinds that a step on tensors can tell apart."""
    found = moment.memory.by_kind()
    return {k: v for k, v in found.items() if k not in ("ahead", "in_flight")}


def _microseconds(seconds: float, *, since: float = 0.0) -> float:
    """Return the whole nanoseconds from ``since`` to ``seconds``, in microseconds."""
    nanoseconds = round(1e9 * seconds) - round(1e9 * since)
    # Perfetto cuts to nanoseconds, and drops events that overlap. The product with 1000
    # may be just below the whole number, so a quarter is added.
    return (nanoseconds + 0.25) / 1e3
