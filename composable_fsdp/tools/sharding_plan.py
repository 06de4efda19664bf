"""``ShardingPlan``: units, memory and traffic, known before any tensor moves."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import ROOT_NAME, runs_of
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.storage.save_parts import save_bytes
from composable_fsdp.tools.machine import MACHINES, Machine
from composable_fsdp.tools.memory import (
    OPTIMIZERS,
    Activations,
    DeviceType,
    Memory,
    OptimizerMemory,
    StepMoment,
    Traffic,
    optimizer_memory,
    traffic_of,
)
from composable_fsdp.tools.plan_report import report_of, text_of
from composable_fsdp.tools.step_memory import (
    StepMemory,
    flows_of,
    memory_of_step,
    parents_of,
)
from composable_fsdp.tools.step_time import StepTime, time_of_step

_NOTHING = Memory()


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The frozen result of planning; ``str()`` gives the report."""

    units: tuple[UnitPlan, ...]
    """One plan per unit, in ``.modules()`` order unless ``in_forward_order`` changed
    the order; the first unit is the root."""
    world_size: int
    """Number of ranks in all."""

    def in_forward_order(self, fqns: Sequence[str]) -> ShardingPlan:
        """Return the plan with the units in the order in which their forwards begin.

        ``fqns`` names units in that order. Units that are not named stay behind the
        unit before them. Nested units stay behind the unit that encloses them.
        """
        place = {fqn: at for at, fqn in enumerate(fqns)}
        # Of each unit the places of those around it, and its own: enclosing units sort
        # before those inside, and still form a stack.
        paths: list[tuple[tuple[int, int], ...]] = []
        at = 0
        for unit, parent in zip(self.units, parents_of(self.units), strict=True):
            at = place.get(unit.fqn, at)
            around = paths[parent] if parent >= 0 else ()
            paths.append((*around, (at, len(paths))))
        order = sorted(range(len(paths)), key=paths.__getitem__)
        return replace(self, units=tuple(self.units[index] for index in order))

    @property
    def numel(self) -> int:
        """Elements of all parameters in the units; a tied parameter counts once."""
        return sum(r.numel for u in self.units for r in u.regions)

    @property
    def whole_numel(self) -> int:
        """Elements of all parameters as the model without tensor parallelism has them.

        A plan lays out this rank's part of a parameter that tensor parallelism cuts.
        """
        slots = [s for u in self.units for r in u.regions for s in r.parameters]
        return sum(s.numel if s.whole is None else prod(s.whole.shape) for s in slots)

    @property
    def padded_numel(self) -> int:
        """Elements of all parameters in the units, padding included."""
        return sum(r.padded_numel for u in self.units for r in u.regions)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of sharded parameters per rank, on device and host."""
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of sharded gradients per rank after backward, on device and host."""
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters and gradients that CPU offload keeps on the host."""
        return sum(
            unit.parameter_bytes + unit.gradient_bytes
            for unit in self.units
            if unit.is_offloaded
        )

    def save_bytes(
        self, *, optimizer_states: int = 0, bytes_per_element: float = 0
    ) -> int:
        """Return the host memory that ``async_save`` holds on a rank, at most.

        Tensors in no unit, scalar states and random states come in addition.

        Args:
            optimizer_states: as in ``peak``; 2 for AdamW. Default 0.
            bytes_per_element: what the optimizer keeps beside them. Default 0.
        """
        pairs = [(r, unit.replicas) for unit in self.units for r in unit.regions]
        return save_bytes(pairs, optimizer_states, bytes_per_element)

    @property
    def traffic(self) -> Traffic:
        """Collectives and bytes of a training step; the first unit is the root."""
        return sum(self.unit_traffic(), Traffic())

    def unit_traffic(self) -> list[Traffic]:
        """Return the collectives and bytes of a training step per unit."""
        return [
            traffic_of(unit, is_root=unit is self.units[0], in_backward=flows)
            for unit, flows in zip(self.units, flows_of(self.units), strict=True)
        ]

    def peak(self, *, device_type: str = "cuda", optimizer_states: int = 0) -> Memory:
        """Return the largest memory that forward and backward need on the device.

        Activations are not counted. ``tools.step_memory`` states the assumptions about
        the step.

        Args:
            device_type: "cuda" (default) counts only the device memory of offloaded
                units, and frees a resharded unit late, as the streams do. "cpu" counts
                host memory.
            optimizer_states: number of tensors that the optimizer keeps per trainable
                parameter, in the parameter's dtype; 2 for AdamW. Default 0.

        Returns: bytes by kind; ``when`` is the moment, and ``full`` has all full
        parameters.
        """
        kept = OptimizerMemory("", optimizer_states)
        *moments, _ = Forecast(self, kept, None, device_type).moments
        most = max((each.memory for each in moments), key=lambda now: now.total)
        return most._replace(full=most.full + most.ahead, ahead=0)

    def step_time(
        self,
        machine: str | Machine,
        activations: Activations,
        *,
        optimizer: str | float | OptimizerMemory = "adamw-fused",
        compiled: bool = False,
        float8: bool = False,
    ) -> StepTime:
        """Return how long a step takes on ``machine``, an estimate by its schedule.

        Not counted: the host's time per unit, collectives of the model itself, and
        copies of CPU offload.

        Args:
            machine: a ``Machine``, or the name of one in ``MACHINES``, such as "h100".
            activations: the result of ``measure_activations`` for this plan.
            optimizer: as in ``forecast``. Default "adamw-fused".
            compiled: whether ``torch.compile`` fuses what is between matrix products.
                Default False.
            float8: whether matrix products below the root are in float8. Default False.

        Returns: seconds, and tokens per second and rank.
        Raises: PlanError, for an unknown machine.

        >>> from composable_fsdp import plan
        >>> from composable_fsdp.tools import measure_activations
        >>> net = nn.Linear(1024, 1024, bias=False)
        >>> planned = plan(net, world_size=8)
        >>> saved = measure_activations(net, planned, [torch.empty(4096, 1024)])
        >>> planned.step_time("h200", saved) < planned.step_time("pcie", saved)
        True
        """
        speeds = MACHINES.get(str(machine), machine)
        if not isinstance(speeds, Machine):
            raise PlanError(
                f"machine expects a Machine, or one of {', '.join(MACHINES)}; got "
                f"{machine!r}."
            )
        found = self.in_forward_order(activations.order)
        kept = optimizer_memory(optimizer)
        given = (Forecast(found, kept).moments, found.units, speeds, activations, kept)
        return time_of_step(*given, compiled=compiled, float8=float8)

    def step_memory(
        self, *, device_type: str = "cuda", held: Memory = _NOTHING
    ) -> StepMemory:
        """Return the memory of a step, operation by operation.

        ``device_type`` is as in ``peak``; ``held`` is there at each moment.
        """
        streams = device_type == "cuda"
        return memory_of_step(self.units, held, streams=streams)

    def __str__(self) -> str:
        return text_of(report_of(Forecast(self, OPTIMIZERS["none"])))


class Fold(NamedTuple):
    """Equal units: the names of all, such as "blocks.0-23", the first, their places."""

    name: str
    unit: UnitPlan
    indices: tuple[int, ...]

    @property
    def times(self) -> int:
        """Number of units."""
        return len(self.indices)


def fold_units(units: Sequence[UnitPlan]) -> list[Fold]:
    """Return the units in groups of those that are equal but for numbers in names."""
    groups: dict[Hashable, list[int]] = {}
    for index, unit in enumerate(units):
        pattern = ".".join("#" if p.isdigit() else p for p in unit.fqn.split("."))
        # Layouts compare by value, so blocks built apart are equal, too.
        groups.setdefault(replace(unit, fqn=pattern), []).append(index)
    return [
        Fold(_common_name([units[i].fqn for i in all_]), units[all_[0]], tuple(all_))
        for all_ in groups.values()
    ]


def _common_name(fqns: Sequence[str]) -> str:
    """Return a name for units whose names differ in numbers only.

    >>> _common_name(["blocks.0", "blocks.1", "blocks.2", "blocks.4"])
    'blocks.0-2,4'
    """
    if len(fqns) == 1:
        return fqns[0] or ROOT_NAME
    # Equal patterns have equal numbers of components.
    parts = [fqn.split(".") for fqn in fqns]
    columns = [[*dict.fromkeys(column)] for column in zip(*parts, strict=True)]
    # The ranges of several numbers name all combinations: write them only if all
    # combinations are there.
    exact = prod(map(len, columns)) == len(fqns)
    # Components that are equal in all names stay as they are.
    return ".".join(
        column[0]
        if len(column) == 1
        else ",".join(runs_of(map(int, column)))
        if exact
        else "*"
        for column in columns
    )


class UnitRow(NamedTuple):
    """Equal units, with the bytes of all of them per rank; ``full`` is of one unit."""

    fold: Fold
    numel: int
    padded_numel: int
    parameters: int
    gradients: int
    optimizer: int
    full: int
    traffic: Traffic

    @property
    def sharded(self) -> int:
        """Bytes that stay between steps: parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Forecast:
    """What a rank holds and sends in a training step; the result of ``forecast``."""

    plan: ShardingPlan
    optimizer: OptimizerMemory = OPTIMIZERS["adamw"]
    activations: Activations | None = None
    device_type: str = "cuda"

    @cached_property
    def rows(self) -> tuple[UnitRow, ...]:
        """A row per group of equal units; parameters with full ones that stay."""
        # Equal units may have unequal traffic: the first trainable unit ends backward.
        traffic = self.plan.unit_traffic()
        rows = []
        for fold in fold_units(self.plan.units):
            unit, times = fold.unit, fold.times
            # Full parameters or pieces that stay between steps.
            rest = unit.full_bytes * unit.stays_full + unit.piece_bytes * unit.has_rest
            row = UnitRow(
                fold,
                times * sum(region.numel for region in unit.regions),
                times * sum(region.padded_numel for region in unit.regions),
                times * (unit.parameter_bytes + rest),
                times * unit.gradient_bytes,
                times * self.optimizer.state_bytes(unit),
                unit.full_bytes,
                sum((traffic[i] for i in fold.indices), Traffic()),
            )
            rows.append(row)
        return tuple(rows)

    @cached_property
    def moments(self) -> tuple[StepMoment, ...]:
        """The memory at each operation of a step, ending with the optimizer's step."""
        # On the CPU the host's memory is the device's.
        on_cpu, optimizer = self.device_type == "cpu", self.optimizer
        units = [u for u in self.plan.units if on_cpu or not u.is_offloaded]
        here = [u for u in units if on_cpu or not u.has_host_states]
        states = sum(map(optimizer.state_bytes, here))
        # What stays from step to step. The walk counts all other gradients.
        held = Memory(
            parameters=sum(unit.parameter_bytes for unit in units)
            + sum(unit.piece_bytes for unit in self.plan.units if unit.has_rest),
            gradients=sum(unit.gradient_bytes for unit in units if unit.is_offloaded),
            optimizer=states,
        )
        step = self.plan.step_memory(device_type=self.device_type, held=held)
        # The optimizer steps after backward, when no full parameters are left, but the
        # slots of an arena.
        end = held._replace(
            gradients=sum(unit.gradient_bytes for unit in units),
            optimizer=states + optimizer.buffer_bytes(units),
            full=step.kept
            + sum(unit.full_bytes for unit in self.plan.units if unit.stays_full),
            temporaries=sum(map(optimizer.temporary_bytes, units)),
            when="optimizer step",
        )
        moments = (*step.moments, StepMoment(end))
        return self.activations.beside(moments) if self.activations else moments

    @cached_property
    def peak(self) -> StepMoment:
        """The first moment of a step with most bytes on the device."""
        return max(self.moments, key=lambda moment: moment.memory.total)

    @property
    def total(self) -> int:
        """Bytes on the device at the peak."""
        return self.peak.memory.total

    @property
    def host_bytes(self) -> int:
        """Bytes on the host: shards, gradients and states of offloaded units."""
        # On CPU the host's memory is the device's, which the moments count.
        if self.device_type == "cpu":
            return 0
        return self.plan.host_bytes + sum(
            self.optimizer.state_bytes(unit)
            for unit in self.plan.units
            if unit.is_offloaded or unit.has_host_states
        )

    @property
    def save_bytes(self) -> int:
        """Bytes on the host that ``async_save`` holds; see ``save_bytes`` of a plan."""
        kept = self.optimizer
        return self.plan.save_bytes(
            optimizer_states=kept.states, bytes_per_element=kept.bytes_per_element
        )


def forecast(
    plan: ShardingPlan,
    *,
    optimizer: str | float | OptimizerMemory = "adamw",
    activations: Activations | None = None,
    device_type: DeviceType = "cuda",
) -> Forecast:
    """Return the memory of a rank and the traffic of a step, with an optimizer.

    Args:
        plan: the result of ``plan()``.
        optimizer: a name ("adamw", the default; "adamw-fused", "adam", "adam-fused",
            "sgd", "sgd-momentum", "none"), or the bytes that the optimizer keeps per
            element of a parameter.
        activations: the result of ``measure_activations``, whose forward also gives the
            order of the units. Default None: left out.
        device_type: "cuda" (default) or "cpu", as in ``ShardingPlan.peak``.

    Returns: the forecast; ``total`` is the bytes at the peak.
    Raises: PlanError, if ``optimizer`` is unknown.

    >>> import torch
    >>> from composable_fsdp import plan
    >>> planned = plan(torch.nn.Linear(8, 8, bias=False), world_size=4)
    >>> forecast(planned, optimizer="adamw-fused").rows[0].optimizer
    128
    """
    # A measured forward shows the order of the units; a plan alone has to guess it.
    if activations is not None:
        plan = plan.in_forward_order(activations.order)
    return Forecast(plan, optimizer_memory(optimizer), activations, device_type)
