"""``Forecast``: the memory of a rank and the traffic of a step, as sums that add up.

A forecast adds an optimizer and, if known, activations to a plan::

    ShardingPlan --Forecast--> rows      parameters, gradients, optimizer per unit
                           '-> moments   all bytes on the device, through one step
                           '-> peak      the moment with most bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.activations import Activations, Held
from composable_fsdp.tools.fold import Fold, fold_units
from composable_fsdp.tools.optimizers import (
    OPTIMIZERS,
    OptimizerMemory,
    optimizer_memory,
)
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.step_memory import Event
from composable_fsdp.tools.unit_costs import Traffic


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a rank's device at a moment, by kind.

    Args:
        parameters: sharded parameters.
        gradients: sharded gradients.
        optimizer: states of the optimizer.
        full: full parameters in use, or not freed yet.
        ahead: full parameters whose all-gather is in flight, ahead of their use.
        reduce: buffers of the reduction in flight.
        in_flight: gradients from autograd that are not in a reduce buffer yet.
        activations: tensors that forward saved for backward.
        temporaries: tensors that a computation or the optimizer's step allocates and
            frees: gradients of activations, the loss.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    full: int = 0
    ahead: int = 0
    reduce: int = 0
    in_flight: int = 0
    activations: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes by the name of the field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class UnitRow(NamedTuple):
    """Equal units, with the bytes of all of them per rank.

    Args:
        fold: the units.
        numel: elements of the parameters.
        padded_numel: elements of the parameters, padding included.
        parameters: bytes of sharded parameters.
        gradients: bytes of sharded gradients.
        optimizer: bytes of optimizer states.
        full: bytes of a single unsharded unit.
        traffic: collectives of a step and their bytes.
    """

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


class StepMoment(NamedTuple):
    """A moment of a step: the event (None for the optimizer's step) and the memory."""

    event: Event | None
    when: str
    memory: DeviceMemory


@dataclass(frozen=True)
class Forecast:
    """What a rank holds and sends in a training step.

    Args:
        plan: the plan of the model.
        optimizer: the optimizer's memory. Default: AdamW in its ``foreach`` form, the
            default of torch.
        activations: what forward saves for backward. Default None: left out.
        device_type: "cuda" (default) or "cpu", as in ``ShardingPlan.peak``.
    """

    plan: ShardingPlan
    optimizer: OptimizerMemory = OPTIMIZERS["adamw"]
    activations: Activations | None = None
    device_type: str = "cuda"

    @cached_property
    def rows(self) -> tuple[UnitRow, ...]:
        """A row per group of equal units; the columns sum to the plan's totals."""
        # Equal units may have unequal traffic: the first trainable unit ends backward.
        traffic = self.plan.unit_traffic()
        return tuple(
            self._row(fold, sum((traffic[i] for i in fold.indices), Traffic()))
            for fold in fold_units(self.plan.units)
        )

    def _row(self, fold: Fold, traffic: Traffic) -> UnitRow:
        """Return the row of equal units."""
        unit, count = fold.unit, fold.times
        return UnitRow(
            fold,
            count * sum(region.numel for region in unit.regions),
            count * sum(region.padded_numel for region in unit.regions),
            count * unit.parameter_bytes,
            count * unit.gradient_bytes,
            count * self.optimizer.state_bytes(unit),
            unit.full_bytes,
            traffic,
        )

    @cached_property
    def moments(self) -> tuple[StepMoment, ...]:
        """The memory at each operation of a step, ending with the optimizer's step."""
        units = self._on_device
        # These are the same at every moment of a step.
        kept = {
            "parameters": sum(unit.parameter_bytes for unit in units),
            "optimizer": sum(self.optimizer.state_bytes(unit) for unit in units),
        }
        # Offloaded gradients have memory of their own from step to step. The walk
        # through the step counts the gradients of all other units.
        own = sum(unit.gradient_bytes for unit in units if unit.is_offloaded)
        step = self.plan.step_memory(device_type=self.device_type)
        found = [
            StepMoment(
                event,
                event.moment.when,
                DeviceMemory(
                    **kept,
                    gradients=event.moment.gradients + own,
                    full=event.moment.full - event.moment.ahead,
                    ahead=event.moment.ahead,
                    reduce=event.moment.reduce,
                    in_flight=event.moment.in_flight,
                    activations=held.saved,
                    temporaries=held.beside,
                ),
            )
            for event, held in zip(step.events, self._held(step.events), strict=True)
        ]
        # The optimizer steps after backward, when no full parameters are left, but the
        # slots of an arena.
        end = DeviceMemory(
            **kept,
            gradients=sum(unit.gradient_bytes for unit in units),
            full=step.kept[0],
            reduce=step.kept[1],
            temporaries=sum(self.optimizer.temporary_bytes(unit) for unit in units),
        )
        return (*found, StepMoment(None, "optimizer step", end))

    @property
    def _on_device(self) -> list[UnitPlan]:
        """The units whose shards are on the compute device."""
        on_cpu = self.device_type == "cpu"
        return [unit for unit in self.plan.units if on_cpu or not unit.is_offloaded]

    def _held(self, events: Sequence[Event]) -> list[Held]:
        """Return the bytes of activations, and beside them, at each event."""
        if self.activations is None:
            return [Held(0, 0) for _ in events]
        fqns = [unit.fqn for unit in self.plan.units]
        return self.activations.through(events, fqns)

    @property
    def peak(self) -> StepMoment:
        """The moment of a step with most bytes on the device."""
        # ``max`` takes the first of equal moments, as ``memory_of_step`` does.
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
            if unit.is_offloaded
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
    device_type: str = "cuda",
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
