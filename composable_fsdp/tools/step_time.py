"""The time of a step, from a plan's schedule, measured operations and a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.machine import FUSED, MEMORY, Cost, Machine
from composable_fsdp.tools.memory import (
    Activations,
    OptimizerMemory,
    StepMoment,
    gathered_bytes,
)
from composable_fsdp.tools.simulated_world import (
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
    gathers, reductions = clock.new_stream().number, clock.new_stream().number
    # When the full parameters of a unit were there, and when they were used last.
    arrived, used = dict.fromkeys(by_name, 0.0), dict.fromkeys(by_name, 0.0)
    filled: set[str] = set()
    left_out = MEMORY if compiled else FUSED

    def send(stream: int, seconds: float) -> float:
        sent = SimulatedOperation(COMMUNICATION, "", None)
        clock.go_on(stream, clock.send_on(stream, sent, seconds))
        return clock.reached(stream)

    for event in (moment.event for moment in moments[:-1]):
        name, unit = event.unit, by_name[event.unit]
        if event.kind == GATHER:
            seconds = _gather(unit, machine, is_first=event.phase == "forward")
            arrived[name] = send(gathers, seconds)
        elif event.kind == FREE:
            # The host waits for the unit whose memory the next all-gather takes.
            clock.block(used[name])
        elif event.kind != REDUCE:
            clock.go_on(0, arrived[name])
            seconds = issued = 0.0
            for cost, times in activations.work.get(event, {}).items():
                if cost.kind != left_out:
                    low = float8 and bool(name)
                    seconds += times * machine.seconds(cost, float8=low)
                    issued += times * machine.launch
            clock.compute(name, seconds)
            # Meanwhile the host issues what follows.
            clock.issue(issued)
            used[name] = clock.reached(0)
        # First the gradients move into the buffers, then they are sent.
        elif name in filled:
            clock.go_on(reductions, clock.reached(0))
            send(reductions, _reduction(unit, machine))
        else:
            filled.add(name)
    clock.go_on(0, clock.reached(reductions))
    moved = Cost(MEMORY, 0, _optimizer_bytes(units, optimizer))
    clock.compute(None, machine.seconds(moved))
    busy = sum(o.end - o.begin for o in clock.operations if o.kind == COMPUTE)
    end = clock.reached(0)
    return StepTime(end, busy, end - busy, activations.tokens)


def _optimizer_bytes(units: Sequence[UnitPlan], optimizer: OptimizerMemory) -> int:
    """Return what the optimizer moves: it writes all that it reads but gradients."""
    return sum(
        2 * (each.parameter_bytes + optimizer.state_bytes(each))
        + each.gradient_bytes
        + 6 * optimizer.temporary_bytes(each)
        for each in units
        if each.is_trainable
    )


def _gather(unit: UnitPlan, machine: Machine, *, is_first: bool) -> float:
    """Return the seconds of the all-gathers of a unit, over pieces and within one."""
    ranks = unit.shard_world_size
    if unit.piece_ranks and (unit.has_rest or not is_first):
        ranks = unit.piece_ranks
    seconds = machine.collective(gathered_bytes(unit), ranks)
    if unit.has_rest and is_first:
        seconds += machine.collective(unit.piece_bytes, unit.shard_world_size // ranks)
    return seconds


def _reduction(unit: UnitPlan, machine: Machine) -> float:
    """Return the seconds of the reductions of a unit, over shards and replicas."""
    nbytes, ranks = unit.reduce_bytes, unit.gradient_ranks
    # Replicas of a shard are in different nodes, if a group fills its nodes.
    apart = ranks >= machine.node_size > 1
    own = machine.collective(nbytes // ranks, unit.sum_ranks, rounds=2, apart=apart)
    return machine.collective(nbytes, ranks) + own
