"""``Forecast``: the memory of a rank and the traffic of a step, as sums that add up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from composable_fsdp.errors import PlanError
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.activations import Activations, Held
from composable_fsdp.tools.fold import Fold, fold_units
from composable_fsdp.tools.memory import Memory, StepMoment
from composable_fsdp.tools.sharding_plan import ShardingPlan, offloaded_gradients
from composable_fsdp.tools.unit_costs import Traffic


class OptimizerMemory(NamedTuple):
    """Bytes of an optimizer, for this rank's shards.

    Args:
        name: the name, for a reader.
        states: tensors that the optimizer keeps per trainable parameter, in the
            parameter's dtype. Default 0.
        temporaries: tensors of the parameter's dtype and size that the step allocates
            for all parameters together, as the ``foreach`` form of AdamW does. Default
            0.
        bytes_per_element: bytes that the optimizer keeps per element of a trainable
            parameter, besides ``states``. Default 0.
    """

    name: str
    states: int = 0
    temporaries: int = 0
    bytes_per_element: float = 0

    def state_bytes(self, unit: UnitPlan) -> int:
        """Return the bytes of the states of this rank's shards, padding included."""
        return self._bytes(unit, self.states, self.bytes_per_element)

    def temporary_bytes(self, unit: UnitPlan) -> int:
        """Return the bytes that the step allocates beside the states."""
        return self._bytes(unit, self.temporaries)

    def _bytes(self, unit: UnitPlan, tensors: int, each: float = 0) -> int:
        """Return the bytes of tensors per trainable parameter, and per element."""
        trainable = [region for region in unit.regions if region.trainable]
        return sum(
            tensors * r.shard_numel * r.dtype.itemsize + round(each * r.shard_numel)
            for r in trainable
        )


OPTIMIZERS = {
    # The default of torch on CUDA is the ``foreach`` form, whose step holds the square
    # roots of all second moments at once.
    "adamw": OptimizerMemory("AdamW", states=2, temporaries=1),
    "adamw-fused": OptimizerMemory("AdamW(fused=True)", states=2),
    "adam": OptimizerMemory("Adam", states=2, temporaries=1),
    "adam-fused": OptimizerMemory("Adam(fused=True)", states=2),
    "sgd": OptimizerMemory("SGD"),
    "sgd-momentum": OptimizerMemory("SGD with momentum", states=1),
    "none": OptimizerMemory("no optimizer"),
}
"""Optimizers of torch by the names that ``optimizer_memory`` accepts."""


def optimizer_memory(given: str | float | OptimizerMemory) -> OptimizerMemory:
    """Return the memory of an optimizer by name, or by bytes per element, as text too.

    Raises: PlanError, if ``given`` is neither.

    >>> optimizer_memory("adamw").states, optimizer_memory(2.5).bytes_per_element
    (2, 2.5)
    """
    if isinstance(given, OptimizerMemory):
        return given
    if isinstance(given, str) and given.lower() in OPTIMIZERS:
        return OPTIMIZERS[given.lower()]
    # The command line passes numbers as text.
    try:
        size = float(given)
    except (TypeError, ValueError):
        size = -1.0
    # Neither NaN nor infinity is a size.
    if not 0 <= size < 1e6:
        raise PlanError(
            f"optimizer expects one of {', '.join(OPTIMIZERS)}, or the bytes that the "
            f"optimizer keeps per element of a parameter, such as 2; got {given!r}."
        )
    return OptimizerMemory(f"{size:g} bytes per element", bytes_per_element=size)


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


@dataclass(frozen=True)
class Forecast:
    """What a rank holds and sends in a training step.

    Args:
        plan: the plan of the model.
        optimizer: the optimizer's memory. Default: AdamW in its ``foreach`` form, the
            default of torch.
        activations: what a step holds beside the plan's buffers. Default None: left
            out.
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
            UnitRow(
                fold,
                fold.times * sum(region.numel for region in fold.unit.regions),
                fold.times * sum(region.padded_numel for region in fold.unit.regions),
                fold.times * fold.unit.parameter_bytes,
                fold.times * fold.unit.gradient_bytes,
                fold.times * self.optimizer.state_bytes(fold.unit),
                fold.unit.full_bytes,
                sum((traffic[i] for i in fold.indices), Traffic()),
            )
            for fold in fold_units(self.plan.units)
        )

    @cached_property
    def moments(self) -> tuple[StepMoment, ...]:
        """The memory at each operation of a step, ending with the optimizer's step."""
        units = self.plan.on_device(self.device_type)
        step = self.plan.step_memory(device_type=self.device_type)
        held = [Held(0, 0)] * len(step.events)
        if self.activations is not None:
            fqns = [unit.fqn for unit in self.plan.units]
            held = self.activations.through(step.events, fqns)
        own = offloaded_gradients(units)
        # The optimizer steps after backward, when no full parameters are left, but the
        # slots of an arena. What stays from step to step is there at every moment.
        end = Memory(
            parameters=sum(unit.parameter_bytes for unit in units),
            gradients=sum(unit.gradient_bytes for unit in units),
            optimizer=sum(self.optimizer.state_bytes(unit) for unit in units),
            full=step.kept[0],
            reduce=step.kept[1],
            temporaries=sum(self.optimizer.temporary_bytes(unit) for unit in units),
            when="optimizer step",
        )
        return (
            *(
                StepMoment(
                    event.memory._replace(
                        parameters=end.parameters,
                        gradients=event.memory.gradients + own,
                        optimizer=end.optimizer,
                        activations=saved,
                        temporaries=beside,
                    ),
                    event,
                )
                for event, (saved, beside) in zip(step.events, held, strict=True)
            ),
            StepMoment(end),
        )

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
        offloaded = [unit for unit in self.plan.units if unit.is_offloaded]
        return self.plan.host_bytes + sum(map(self.optimizer.state_bytes, offloaded))

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
