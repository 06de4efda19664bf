"""The time of a step, from a plan's schedule, measured operations and a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.machine import FUSED, MEMORY, Cost, Machine
from composable_fsdp.tools.memory import Activations, OptimizerMemory, StepMoment
from composable_fsdp.tools.simulated_clock import (
    COMMUNICATION,
    COMPUTE,
    Clock,
    SimulatedOperation,
)
from composable_fsdp.tools.step_memory import FREE, GATHER, REDUCE


class StepTime(NamedTuple):
    """Seconds of a step of a rank: in all, computing, waiting for collectives or host.

    ``tokens`` are those of the batch of the rank; rows of a batch that has no ids.
    """

    seconds: float
    computing: float
    waiting: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and rank."""
        return self.tokens / self.seconds


def time_of_step(
    moments: Sequence[StepMoment],
    units: Sequence[UnitPlan],
    machine: Machine,
    activations: Activations,
    optimizer: OptimizerMemory,
    *,
    compiled: bool,
    float8: bool,
) -> StepTime:
    """Return the time of the operations of ``moments`` on streams and a link."""
    by_name = {unit.fqn: unit for unit in units}
    clock = Clock(machine)
    compute = clock.current
    gathers, reductions = clock.new_stream(), clock.new_stream()
    # When the full parameters of a unit were there, and when they were used last.
    arrived, used = dict.fromkeys(by_name, 0.0), dict.fromkeys(by_name, 0.0)
    filled: set[str] = set()
    for event in (moment.event for moment in moments[:-1]):
        name, unit = event.unit, by_name[event.unit]
        clock.stage = event.phase
        if event.kind == GATHER:
            _send(clock, gathers.number, "all_gather", _gather(unit, machine))
            arrived[name] = clock.reached(gathers.number)
        elif event.kind == FREE:
            # The host waits for the unit whose memory the next all-gather takes.
            clock.block(used[name])
        elif event.kind != REDUCE:
            clock.go_on(0, arrived[name])
            left_out = MEMORY if compiled else FUSED
            work = activations.work.get(event) or Counter()
            chosen = [(each, n) for each, n in work.items() if each.kind != left_out]
            in_float8 = float8 and bool(name)
            times = [n * machine.seconds(each, float8=in_float8) for each, n in chosen]
            clock.compute(name, sum(times))
            # The device computes while the host issues what follows.
            clock.issue(machine.launch * sum(n for _, n in chosen))
            used[name] = clock.reached(0)
        # First the gradients move into the buffers, then they are sent.
        elif name in filled:
            reductions.wait_stream(compute)
            _send(clock, reductions.number, "reduce", _reduction(unit, machine))
        else:
            filled.add(name)
    compute.wait_stream(reductions)
    # Values and states are read and written, gradients are read.
    moved = sum(
        2 * (each.parameter_bytes + optimizer.state_bytes(each))
        + each.gradient_bytes
        + 6 * optimizer.temporary_bytes(each)
        for each in units
        if each.is_trainable
    )
    clock.stage = "optimizer step"
    clock.compute(None, machine.seconds(Cost(MEMORY, 0, moved)))
    busy = sum(o.end - o.begin for o in clock.operations if o.kind == COMPUTE)
    end = clock.reached(0)
    return StepTime(end, busy, end - busy, activations.tokens)


def _send(clock: Clock, stream: int, name: str, seconds: float) -> None:
    """Send collectives of a unit on a stream."""
    made = SimulatedOperation(COMMUNICATION, name, None)
    clock.go_on(stream, clock.send_on(stream, made, seconds))


def _gather(unit: UnitPlan, machine: Machine) -> float:
    """Return the seconds of the all-gathers of a unit."""
    sizes = [
        r.wire_nbytes or r.padded_numel * d.compute.itemsize
        for r, d in unit.with_dtypes
    ]
    ranks = unit.shard_world_size
    return machine.collective(sum(sizes), ranks) if ranks > 1 else 0.0


def _reduction(unit: UnitPlan, machine: Machine) -> float:
    """Return the seconds of the reductions of a unit, over shards and replicas."""
    nbytes, ranks, replicas = unit.reduce_bytes, unit.shard_world_size, unit.replicas
    seconds = machine.collective(nbytes, ranks) if ranks > 1 else 0.0
    # Replicas of a shard are in different nodes, if a group fills its nodes.
    apart = ranks >= machine.node_size > 1
    part = nbytes // ranks
    more = machine.collective(part, replicas, rounds=2, apart=apart)
    return seconds + more * (replicas > 1)
