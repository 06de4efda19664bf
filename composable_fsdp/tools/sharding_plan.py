"""``ShardingPlan``: units, memory and traffic, known before any tensor moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import or_

import torch
from torch import nn

from composable_fsdp.config import Block
from composable_fsdp.naming import ROOT_NAME, size_text
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.planner import Target, plan_targets
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.storage.save_parts import save_bytes
from composable_fsdp.tools.fold import Fold, fold_units
from composable_fsdp.tools.memory import Memory
from composable_fsdp.tools.owner_plan import OwnerPlan, plan_owners
from composable_fsdp.tools.step_memory import StepMemory, memory_of_step
from composable_fsdp.tools.texts import counted, dtype_text, sent_text, table
from composable_fsdp.tools.unit_costs import Traffic, UnitMemory, traffic_of


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The frozen result of planning; ``str()`` gives the report."""

    units: tuple[UnitPlan, ...]
    """One plan per unit, in ``.modules()`` order unless ``in_forward_order`` changed
    the order; the first unit is the root."""
    world_size: int
    """Number of ranks in all."""
    warnings: tuple[str, ...] = ()
    """Sentences on avoidable padding, for a reader; see ``padding_notes``."""

    def in_forward_order(self, fqns: Sequence[str]) -> ShardingPlan:
        """Return the plan with the units in the order in which their forwards begin.

        ``fqns`` names units in that order. Units that are not named stay behind the
        unit before them. Nested units stay behind the unit that encloses them.
        """
        place = {fqn: at for at, fqn in enumerate(fqns)}
        nested: dict[int, list[tuple[int, int]]] = {}
        at = 0
        for index, parent in enumerate(_parents(self.units)):
            at = place.get(self.units[index].fqn, at)
            nested.setdefault(parent, []).append((at, index))
        order: list[int] = []
        # Depth first, so that enclosing units still form a stack.
        waiting = [-1]
        while waiting:
            index = waiting.pop()
            order.append(index)
            waiting += [each for _, each in sorted(nested.get(index, ()), reverse=True)]
        return replace(self, units=tuple(self.units[index] for index in order[1:]))

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

        The bytes of parameters and optimizer states in units that the rank writes,
        padding included; replicas share the writing. Tensors in no unit, scalar states
        and random states come in addition.

        Args:
            optimizer_states: as in ``peak``; 2 for AdamW. Default 0.
            bytes_per_element: bytes that the optimizer keeps beside these states per
                element of a trainable parameter. Default 0.
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
            traffic_of(unit, is_root=i == 0, in_backward=flows)
            for i, (unit, flows) in enumerate(self._with_flow())
        ]

    def owners(
        self, names: Iterable[str] | None = None, *, dtype: torch.dtype | None = None
    ) -> OwnerPlan:
        """Return the owner of each matrix in ``map_on_owners``, and bytes of a call.

        Args:
            names: the matrices by name from the model, in the order of the call.
                Default None: all trainable parameters of two dims, unit by unit.
            dtype: as in ``map_on_owners``. Default None: the dtype of each parameter.

        Returns: the owners; ``traffic(rank)`` are the bytes of a rank.
        Raises: PlanError, for a name that no unit has.
        """
        return plan_owners(self.units, names, dtype=dtype)

    def _with_flow(self) -> list[tuple[UnitPlan, bool]]:
        """Return pairs of a unit and whether gradients flow through the unit."""
        # Backward runs until the first trainable unit in forward order, so gradients
        # flow through every unit after that unit, frozen units included.
        trainable = accumulate((unit.is_trainable for unit in self.units), or_)
        return list(zip(self.units, trainable, strict=True))

    def peak(self, *, device_type: str = "cuda", optimizer_states: int = 0) -> Memory:
        """Return the largest memory that a step needs per rank on the device.

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
        kept = self.on_device(device_type)
        # An optimizer keeps state for this rank's shards only, padding included.
        states = sum(
            r.shard_numel * r.dtype.itemsize
            for unit in kept
            for r in unit.regions
            if r.trainable
        )
        most = self.step_memory(device_type=device_type).most
        return most._replace(
            parameters=sum(unit.parameter_bytes for unit in kept),
            gradients=most.gradients + offloaded_gradients(kept),
            full=most.full + most.ahead,
            ahead=0,
            optimizer=optimizer_states * states,
        )

    def on_device(self, device_type: str) -> list[UnitPlan]:
        """Return the units whose shards are on the compute device."""
        return [u for u in self.units if device_type == "cpu" or not u.is_offloaded]

    def step_memory(self, *, device_type: str = "cuda") -> StepMemory:
        """Return the memory of a step, operation by operation.

        ``device_type`` is as in ``peak``.
        """
        flow = self._with_flow()
        parents = _parents(self.units)
        on_cuda = device_type == "cuda"
        return memory_of_step(
            [
                UnitMemory(
                    unit,
                    parent=parents[i],
                    in_backward=flows,
                    # Inputs need gradients if a trainable unit precedes in forward
                    # order.
                    fed=i > 0 and flow[i - 1][1],
                    # On CPU a copy casts on the way, without a tensor of its own.
                    on_host=unit.is_offloaded and on_cuda,
                )
                for i, (unit, flows) in enumerate(flow)
            ],
            streams=on_cuda,
        )

    def __str__(self) -> str:
        peak, root = self.peak(), self.units[0] if self.units else None
        # A dict and not a set: the report lists strategies in the order of units.
        strategies = {unit.options.strategy.name: None for unit in self.units}
        of_whole = ""
        if self.whole_numel != self.numel:
            of_whole = f" on this rank (tensor parallelism cuts {self.whole_numel:,})"
        # Experts are sharded over fewer ranks than the model.
        everyone = root.shard_world_size * root.replicas if root else 1
        header = ("unit", "", "class", "elements", "per rank", "padding", "regions")
        rows = [_row(fold, everyone) for fold in fold_units(self.units)]
        return "\n".join(
            [
                *table(header, rows, (0, 2, 6)),
                f"{counted(len(self.units), 'unit')}, {self.numel:,} parameters"
                f"{of_whole}, world size {self.world_size}, {', '.join(strategies)}",
                f"per rank: parameters {size_text(self.parameter_bytes)}, gradients "
                f"{size_text(self.gradient_bytes)}; the largest unit is "
                f"{size_text(max(u.full_bytes for u in self.units))} while it is full",
                f"at the peak {size_text(peak.total)} on the device, in {peak.when}: "
                f"full parameters {size_text(peak.full)}, reduction "
                f"{size_text(peak.reduce)}, gradients in flight "
                f"{size_text(peak.in_flight)}; without activations and optimizer",
                *_arena_text(self.step_memory()),
                f"per step: {sent_text(self.traffic.by_op())}",
                *owner_lines(self),
                *(_mixed_text(u) for u in self.units if u.frozen and u.trainable),
                *self.warnings,
            ]
        )


def offloaded_gradients(units: Iterable[UnitPlan]) -> int:
    """Return the bytes of gradients that have memory from step to step.

    The walk through a step counts the gradients of all other units.
    """
    return sum(unit.gradient_bytes for unit in units if unit.is_offloaded)


def _parents(units: Sequence[UnitPlan]) -> list[int]:
    """Return, per unit, the index of the enclosing unit; -1 for the root."""
    parents: list[int] = []
    inside: list[int] = []
    for index, unit in enumerate(units):
        # Units come in ``.modules()`` order, so the enclosing units form a stack.
        while inside and not _is_inside(unit.fqn, units[inside[-1]].fqn):
            inside.pop()
        parents.append(inside[-1] if inside else -1)
        inside.append(index)
    return parents


def _is_inside(fqn: str, outer: str) -> bool:
    """Return whether the module named ``fqn`` lies below the module named ``outer``."""
    return not outer or fqn.startswith(f"{outer}.")


def _row(fold: Fold, everyone: int) -> tuple[str, ...]:
    """Return the line of equal units, with the sums of all of them."""
    unit = fold.unit
    numel = sum(r.numel for r in unit.regions)
    padded = sum(r.padded_numel for r in unit.regions)
    ranks = unit.shard_world_size * unit.replicas
    over = "" if ranks == everyone else f", over {counted(ranks, 'rank')}"
    return (
        fold.name,
        f"{fold.times} x",
        unit.class_name,
        f"{fold.times * numel:,}",
        size_text(fold.times * unit.parameter_bytes),
        f"{(padded - numel) / numel:.2%}" if numel else "-",
        (", ".join(map(_region_text, unit.regions)) or "no parameters") + over,
    )


def _arena_text(step: StepMemory) -> list[str]:
    """Return a line on the slots of the arena, if there are any."""
    full, reduce = step.kept
    units = sum(len(slot.units) for slot in step.slots)
    reductions = f", {size_text(reduce)} for reductions" if reduce else ""
    if not full + reduce:
        return []
    return [
        f"arena: {counted(len(step.slots), 'slot')} of {size_text(full)} in all for "
        f"the full parameters of {counted(units, 'unit')}{reductions}, between steps, "
        "too"
    ]


def owner_lines(plan: ShardingPlan) -> list[str]:
    """Return a sentence on ``map_on_owners``, for plans with ``Block.TENSOR``."""
    if not any(unit.options.block is Block.TENSOR for unit in plan.units):
        return []
    found = plan.owners()
    count = len(found.owners)
    return [
        f"map_on_owners over {count} matri{'x' if count == 1 else 'ces'}, from the "
        f"rank with most: {sent_text(found.most.by_op())}"
    ]


def _mixed_text(unit: UnitPlan) -> str:
    """Return a sentence on a unit that holds trainable and frozen parameters."""
    trainable, frozen = unit.trainable, unit.frozen
    shown = list(trainable)[:4]
    more = f" and {len(trainable) - 4} more" if len(trainable) > 4 else ""
    return (
        f"unit {unit.fqn or ROOT_NAME} trains {len(trainable)} of "
        f"{len(trainable) + len(frozen)} parameters ({sum(trainable.values()):,} "
        f"elements; {sum(frozen.values()):,} are frozen): {', '.join(shown)}{more}"
    )


def _region_text(region: RegionLayout) -> str:
    """Return a region as text: dtype, frozen, group and number of parameters."""
    frozen = "" if region.trainable else " frozen"
    group = "" if region.group is None else f" group {region.group!r}"
    count = counted(len(region.parameters), "parameter")
    return f"{count} in {dtype_text(region.dtype)}{frozen}{group}"


def plan_modules(
    modules: Sequence[nn.Module], request: PlanRequest
) -> tuple[ShardingPlan, tuple[Target, ...]]:
    """Return the plan of an application of ``fully_shard``, and its targets.

    Raises: as ``plan_targets``.
    """
    targets, notes = plan_targets(modules, request)
    plan = ShardingPlan(tuple(t.plan for t in targets), request.world_size, notes)
    return plan, targets
