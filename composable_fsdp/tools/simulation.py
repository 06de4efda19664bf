"""``Simulation``: the memory and the schedule of a simulated step, and its trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from composable_fsdp.naming import ROOT_NAME, size_text
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.simulated_memory import LiveMemory, Moment
from composable_fsdp.tools.simulated_world import Machine
from composable_fsdp.tools.timetable import COMPUTE, SEND, Timetable


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


class SimulatedOperation(NamedTuple):
    """A computation or a collective of a step.

    Args:
        kind: "compute" or "communication".
        name: "forward", "backward", "clip", "optimizer step", or the collective, such
            as "all_gather".
        unit: name of the unit; "" for the root, None if no single unit is concerned.
        phase: of a collective, the phase of the unit in which it is sent.
        stream: 0 for the stream of the program.
        begin: seconds since the start of the step.
        end: seconds since the start of the step.
        nbytes: of a collective, bytes of the whole buffers.
        group: of a collective, the name of the process group: that of the mesh
            dimension, such as "tp"; "world" for the group of all ranks.
        ranks: of a collective, the number of ranks of that process group.
        by_model: whether the model itself sends the collective, as the layers of
            tensor parallelism and experts do.
    """

    kind: str
    name: str
    unit: str | None
    phase: str
    stream: int
    begin: float
    end: float
    nbytes: int
    group: str = ""
    ranks: int = 0
    by_model: bool = False

    @property
    def title(self) -> str:
        """The name with the unit, as "all_gather blocks.0"."""
        return self.name if self.unit is None else f"{self.name} {_name(self.unit)}"

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


def _name(unit: str) -> str:
    """Return the name of a unit for a reader."""
    return unit or ROOT_NAME


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
        """Seconds of the step in which the stream of the program computes nothing."""
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
        return "\n".join(
            [
                f"step of {len(self.plan.units)} unit"
                f"{'' if len(self.plan.units) == 1 else 's'} on {self.world_size} "
                f"rank{'' if self.world_size == 1 else 's'}, in "
                f"the order of {self.device_type}, optimizer {self.optimizer}",
                f"peak per rank: {size_text(peak.memory.total)} in {peak.when}",
                *rows,
                f"collectives: {_traffic(o for o in own if not o.by_model) or 'none'}",
                *[
                    f"collectives of the model itself over {group} ({ranks} rank"
                    f"{'' if ranks == 1 else 's'}): "
                    + _traffic(o for o in own if (o.link, o.ranks) == (group, ranks))
                    for group, ranks in links
                ],
                f"time on the assumed machine: {1e3 * self.seconds:.3g} ms, of which "
                f"{1e3 * self.exposed:.3g} ms wait for collectives",
            ]
        )

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
                    "unit": None if each.unit is None else _name(each.unit),
                    "phase": each.phase or each.name,
                    **({"bytes": each.nbytes} if each.nbytes else {}),
                    **_about_group(each),
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


def _about_group(each: SimulatedOperation) -> dict[str, Any]:
    """Return the process group of a collective, for an event of a trace."""
    return {"group": each.group, "ranks": each.ranks} if each.group else {}


COMMUNICATION = "communication"
"""The kind of an operation that is a collective."""

LINK_ROW = 1
"""The row of collectives in a trace; 0 is that of the program's computations."""


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


def simulation_of(
    table: Timetable,
    moments: list[Moment],
    *,
    plan: ShardingPlan,
    device_type: str,
    optimizer: str,
    machine: Machine,
    world_size: int,
) -> Simulation:
    """Return the simulation whose events ``table`` has noted.

    Returns: the simulation.
    """
    # Times are known only now: a collective may wait for the link.
    begins = table.times()
    kinds = {COMPUTE: COMPUTE, SEND: COMMUNICATION}
    # Waits and marks have no label, and are in the times of the others.
    operations = [
        SimulatedOperation(
            kinds[event.kind],
            event.label.what,
            event.label.unit,
            event.label.phase,
            event.stream,
            begin,
            begin + event.seconds,
            event.label.nbytes,
            event.label.group,
            event.label.ranks,
            event.label.by_model,
        )
        for event, begin in zip(table.events, begins, strict=True)
        if event.label is not None
    ]
    timeline: list[SimulatedMoment] = []
    latest = 0.0
    for moment in moments:
        # The host runs ahead of streams: its order is kept where times go back.
        at = begins[moment.event] if moment.event >= 0 else 0.0
        # Memory of a collective is there when the collective begins.
        computes = moment.event >= 0 and table.events[moment.event].kind == COMPUTE
        latest = max(latest, at + (moment.offset if computes else 0.0))
        # The stage alone names moments between units.
        label = moment.label
        what = (
            label.what if label.unit is None else f"{label.what} of {_name(label.unit)}"
        )
        timeline.append(SimulatedMoment(latest, what, moment.memory))
    return Simulation(
        plan,
        device_type,
        optimizer,
        machine,
        tuple(timeline),
        tuple(operations),
        world_size,
    )
