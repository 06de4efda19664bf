"""``Simulation``: the memory and the schedule of a simulated step, and its trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from composable_fsdp.naming import ROOT_NAME, size_text
from composable_fsdp.tools.command import counted
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.simulated_memory import SimulatedMoment
from composable_fsdp.tools.simulated_world import Machine
from composable_fsdp.tools.timetable import COMPUTE, SEND, Label, Timetable

COMMUNICATION = "communication"
"""The kind of an operation that is a collective."""

LINK_ROW = 1
"""The row of collectives in a trace; 0 is that of the program's computations."""


@dataclass(frozen=True)
class SimulatedOperation:
    """A computation or a collective of a step.

    Args:
        kind: "compute" or "communication".
        name: "forward", "backward", "clip", "optimizer step", or the collective, such
            as "all_gather".
        unit: name of the unit; "" for the root, None if no single unit is concerned.
        phase: of a collective, the phase of the unit in which it is sent.
        nbytes: of a collective, bytes of the whole buffers.
        group: of a collective, the name of the process group: that of the mesh
            dimension, such as "tp"; "world" for the group of all ranks.
        ranks: of a collective, the number of ranks of that process group.
        by_model: whether the model itself sends the collective, as the layers of
            tensor parallelism and experts do.
        stream: 0 for the stream of the program.
        begin: seconds since the start of the step.
        end: seconds since the start of the step.
    """

    kind: str
    name: str
    unit: str | None
    phase: str
    nbytes: int
    group: str
    ranks: int
    by_model: bool
    stream: int
    begin: float
    end: float

    @property
    def title(self) -> str:
        """The name with the unit, as "all_gather blocks.0"."""
        unit = "" if self.unit is None else f" {self.unit or ROOT_NAME}"
        return self.name + unit

    @property
    def link(self) -> str:
        """The group of a collective of the model itself; "" for others."""
        return self.group if self.by_model else ""


def _traffic(collectives: Iterable[SimulatedOperation]) -> str:
    """Return calls and bytes of each kind of collective as text."""
    sent: dict[str, list[int]] = {}
    for each in collectives:
        sent.setdefault(each.name, []).append(each.nbytes)
    return ", ".join(
        f"{len(sizes)} x {name} of {size_text(sum(sizes))} in all"
        for name, sizes in sent.items()
    )


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
    timeline: tuple[SimulatedMoment, ...]
    operations: tuple[SimulatedOperation, ...]
    world_size: int

    @cached_property
    def peak(self) -> SimulatedMoment:
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
        # Kinds without bytes are left out.
        peak, kinds = self.peak, self.peak.memory.by_kind()
        width = max(map(len, kinds))
        own = self.collectives
        links = dict.fromkeys((o.link, o.ranks) for o in own if o.by_model)
        rows = [
            f"  {kind:<{width}}  {size_text(size):>12}"
            for kind, size in kinds.items()
            if size
        ]
        lines = [
            f"step of {counted(len(self.plan.units), 'unit')} on "
            f"{counted(self.world_size, 'rank')}, in the order of {self.device_type}, "
            f"optimizer {self.optimizer}",
            f"peak per rank: {size_text(peak.memory.total)} in {peak.when}",
            *rows,
            f"collectives: {_traffic(o for o in own if not o.by_model) or 'none'}",
        ]
        lines += [
            f"collectives of the model itself over {group} ({counted(ranks, 'rank')}): "
            + _traffic(o for o in own if (o.link, o.ranks) == (group, ranks))
            for group, ranks in links
        ]
        lines.append(
            f"time on the assumed machine: {1e3 * self.seconds:.3g} ms, of which "
            f"{1e3 * self.exposed:.3g} ms wait for collectives"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the simulation as numbers, for JSON."""
        return {
            "world_size": self.world_size,
            "data_ranks": self.plan.world_size,
            "device_type": self.device_type,
            "optimizer": self.optimizer,
            "peak": {
                "when": self.peak.when,
                "bytes": self.peak.memory.total,
                "by_kind": self.peak.memory.by_kind(),
            },
            "seconds": self.seconds,
            "exposed_seconds": self.exposed,
            "collectives": [
                {
                    "op": each.name,
                    "unit": each.unit,
                    "phase": each.phase,
                    "bytes": each.nbytes,
                    "group": each.group,
                    "ranks": each.ranks,
                    "by_model": each.by_model,
                    "begin": each.begin,
                    "end": each.end,
                }
                for each in self.collectives
            ],
            "timeline": [
                {"seconds": each.seconds, "when": each.when, **each.memory.by_kind()}
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
        """Yield the events: names of rows, operations, and bytes by kind."""
        yield _about("process_name", 0, f"rank 0 of {self.world_size}")
        # Both rows are named also if nothing is on them.
        rows = {0: "compute", LINK_ROW: COMMUNICATION}
        # Rows of links of the model itself are behind those of all streams.
        last = _row(max((o.stream for o in self.operations), default=0)) + LINK_ROW
        links = {"": LINK_ROW}
        for each in self.operations:
            if each.kind == COMMUNICATION:
                row = links.setdefault(each.link, last + len(links))
                rows.setdefault(row, f"communication of the model over {each.link}")
            else:
                row = _row(each.stream)
                rows.setdefault(row, f"copies and casts of stream {each.stream}")
            # A complete event.
            yield {
                "ph": "X",
                "pid": 0,
                "tid": row,
                "cat": each.kind,
                "name": each.title,
                "ts": _microseconds(each.begin),
                # By the ends, so that the next event begins where this one ends.
                "dur": _microseconds(each.end, since=each.begin),
                "args": {
                    "unit": each.unit if each.unit is None else each.unit or ROOT_NAME,
                    "phase": each.phase or each.name,
                    **({"bytes": each.nbytes} if each.nbytes else {}),
                    **(
                        {"group": each.group, "ranks": each.ranks} if each.group else {}
                    ),
                },
            }
        # Rows of side streams exist only if something is computed there.
        for row, name in rows.items():
            yield _about("thread_name", row, name)
        # Perfetto stacks the kinds of a counter.
        for moment in self.timeline:
            yield {
                "ph": "C",
                "pid": 0,
                "name": "live bytes",
                "ts": _microseconds(moment.seconds),
                "args": moment.memory.by_kind(),
            }


def _microseconds(seconds: float, *, since: float = 0.0) -> float:
    """Return the whole nanoseconds from ``since`` to ``seconds``, in microseconds."""
    nanoseconds = round(1e9 * seconds) - round(1e9 * since)
    # Perfetto cuts to nanoseconds, and drops events that overlap. The product with 1000
    # may be just below the whole number, so a quarter is added.
    return (nanoseconds + 0.25) / 1e3


def _row(stream: int) -> int:
    """Return the row of computations on ``stream``."""
    return stream + LINK_ROW if stream else 0


def _about(what: str, row: int, name: str) -> dict[str, Any]:
    """Return the event that gives a row or the process its name."""
    return {"ph": "M", "pid": 0, "tid": row, "name": what, "args": {"name": name}}


def operations_of(
    table: Timetable, begins: Iterable[float]
) -> Iterator[SimulatedOperation]:
    """Yield the operations of a table whose events begin at ``begins``."""
    kinds = {COMPUTE: COMPUTE, SEND: COMMUNICATION}
    for event, begin in zip(table.events, begins, strict=True):
        # Waits and marks have no label, and are in the times of the others.
        if isinstance(event.label, Label):
            yield SimulatedOperation(
                kinds[event.kind],
                *event.label,
                event.stream,
                begin,
                begin + event.seconds,
            )
