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
from composable_fsdp.tools.fold import fold_units
from composable_fsdp.tools.owner_plan import OwnerPlan, plan_owners
from composable_fsdp.tools.step_memory import PeakMemory, StepMemory, memory_of_step
from composable_fsdp.tools.unit_costs import Traffic, memory_of, traffic_of


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

    def peak(
        self, *, device_type: str = "cuda", optimizer_states: int = 0
    ) -> PeakMemory:
        """Return the largest memory that a step needs per rank on the device.

        Activations are not counted. ``tools.step_memory`` states the assumptions about
        the step.

        Args:
            device_type: "cuda" (default) counts only the device memory of offloaded
                units, and frees a resharded unit late, as the streams do. "cpu" counts
                host memory.
            optimizer_states: number of tensors that the optimizer keeps per trainable
                parameter, in the parameter's dtype; 2 for AdamW. Default 0.

        Returns: bytes by kind, and the moment of the peak.
        """
        # On CUDA, the shards of offloaded units are in host memory and do not count.
        on_cuda = device_type == "cuda"
        kept = [u for u in self.units if not (u.is_offloaded and on_cuda)]
        moment = self.step_memory(device_type=device_type).most
        # An optimizer keeps state for this rank's shards only, padding included.
        states = sum(
            r.shard_numel * r.dtype.itemsize
            for unit in kept
            for r in unit.regions
            if r.trainable
        )
        return PeakMemory(
            parameters=sum(unit.parameter_bytes for unit in kept),
            # Offloaded gradients live in host memory permanently, so the walk through
            # the step does not count them. On CPU, host memory is the device's memory.
            gradients=moment.gradients
            + sum(unit.gradient_bytes for unit in kept if unit.is_offloaded),
            full=moment.full,
            reduce=moment.reduce,
            in_flight=moment.in_flight,
            optimizer=optimizer_states * states,
            when=moment.when,
        )

    def step_memory(self, *, device_type: str = "cuda") -> StepMemory:
        """Return the memory of a step, operation by operation.

        ``device_type`` is as in ``peak``.
        """
        flow = self._with_flow()
        parents = _parents(self.units)
        on_cuda = device_type == "cuda"
        return memory_of_step(
            [
                memory_of(
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

    @property
    def report(self) -> str:
        """The plan as text: table of units, totals, partly frozen units, warnings."""
        mixed = [
            _mixed_text(unit) for unit in self.units if unit.frozen and unit.trainable
        ]
        lines = [_table(self.units), *_totals(self), *owner_lines(self)]
        return "\n".join([*lines, *mixed, *self.warnings])

    def __str__(self) -> str:
        return self.report


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


def _table(units: tuple[UnitPlan, ...]) -> str:
    """Return the table of the report: a line for equal units, numbers right-aligned."""
    rows = [("unit", "", "class", "elements", "per rank", "padding", "regions")]
    # Experts are sharded over fewer ranks than the model.
    everyone = units[0].shard_world_size * units[0].replicas if units else 1
    for fold in fold_units(units):
        unit = fold.unit
        numel = sum(r.numel for r in unit.regions)
        padded = sum(r.padded_numel for r in unit.regions)
        rows.append(
            (
                fold.name,
                f"{fold.times} x",
                unit.class_name,
                # A line has the sums of its units, so that the column adds up.
                f"{fold.times * numel:,}",
                size_text(fold.times * unit.parameter_bytes),
                f"{(padded - numel) / numel:.2%}" if numel else "-",
                (", ".join(map(_region_text, unit.regions)) or "no parameters")
                + _over_text(unit, everyone),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # Columns of numbers.
    right = (1, 3, 4, 5)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _over_text(unit: UnitPlan, everyone: int) -> str:
    """Return the number of a unit's ranks, unless they are as many as the model's."""
    ranks = unit.shard_world_size * unit.replicas
    return "" if ranks == everyone else f", over {ranks} rank{'s' * (ranks > 1)}"


def _totals(plan: ShardingPlan) -> list[str]:
    """Return the lines of the report that sum up all units."""
    traffic, peak = plan.traffic, plan.peak()
    # A dict and not a set: the report lists strategies in the order of units.
    strategies = {unit.options.strategy.name: None for unit in plan.units}
    sent = [
        f"{calls} {name}{'s' if calls > 1 else ''} of {size_text(nbytes)} in all"
        for calls, nbytes, name in (
            (traffic.all_gather_calls, traffic.all_gather_bytes, "all-gather"),
            (
                traffic.reduce_scatter_calls,
                traffic.reduce_scatter_bytes,
                "reduce-scatter",
            ),
            (traffic.all_reduce_calls, traffic.all_reduce_bytes, "all-reduce"),
            (traffic.all_to_all_calls, traffic.all_to_all_bytes, "all-to-all"),
        )
        if calls
    ]
    return [
        f"{len(plan.units)} unit{'s' if len(plan.units) > 1 else ''}, "
        f"{plan.numel:,} parameters{of_whole(plan)}, world size "
        f"{plan.world_size}, {', '.join(strategies)}",
        f"per rank: parameters {size_text(plan.parameter_bytes)}, gradients "
        f"{size_text(plan.gradient_bytes)}; the largest unit is "
        f"{size_text(max(u.full_bytes for u in plan.units))} while it is full",
        f"at the peak {size_text(peak.total)} on the device, in {peak.when}: full "
        f"parameters {size_text(peak.full)}, reduction {size_text(peak.reduce)}, "
        f"gradients in flight {size_text(peak.in_flight)}; without activations and "
        "optimizer",
        *_arena_text(plan),
        f"per step: {', '.join(sent) or 'no communication'}",
    ]


def _arena_text(plan: ShardingPlan) -> list[str]:
    """Return a line on the slots of the arena, if there are any."""
    step = plan.step_memory()
    full, reduce = step.kept
    slots, units = len(step.slots), sum(len(slot.units) for slot in step.slots)
    parts = [
        f"{slots} slot{'s' * (slots > 1)} of {size_text(full)} in all for the full "
        f"parameters of {units} unit{'s' * (units > 1)}"
    ]
    if reduce:
        parts.append(f"{size_text(reduce)} for reductions")
    return [f"arena: {', '.join(parts)}, between steps, too"] if full + reduce else []


def of_whole(plan: ShardingPlan) -> str:
    """Return words on how many parameters the whole model has, if this rank has less.

    Sizes and traffic of a plan are those of this rank's tensor-parallel part.
    """
    if plan.whole_numel == plan.numel:
        return ""
    return f" on this rank (tensor parallelism cuts {plan.whole_numel:,})"


def owner_lines(plan: ShardingPlan) -> list[str]:
    """Return a sentence on ``map_on_owners``, for plans with ``Block.TENSOR``."""
    if not any(unit.options.block is Block.TENSOR for unit in plan.units):
        return []
    found = plan.owners()
    most = found.most
    sent = [
        f"{calls} {name}s, of at most {size_text(nbytes)} in all from a rank"
        for calls, nbytes, name in (
            (most.all_to_all_calls, most.all_to_all_bytes, "all-to-all"),
            (most.broadcast_calls, most.broadcast_bytes, "broadcast"),
        )
        if calls
    ]
    count = len(found.owners)
    return [
        f"map_on_owners over {count} matri{'x' if count == 1 else 'ces'}: "
        f"{', '.join(sent) or 'no communication'}"
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
    kind = str(region.dtype).removeprefix("torch.")
    frozen = "" if region.trainable else " frozen"
    group = "" if region.group is None else f" group {region.group!r}"
    count = len(region.parameters)
    return f"{count} parameter{'s' if count > 1 else ''} in {kind}{frozen}{group}"


def plan_modules(
    modules: Sequence[nn.Module], request: PlanRequest
) -> tuple[ShardingPlan, tuple[Target, ...]]:
    """Return the plan of an application of ``fully_shard``, and its targets.

    Raises: as ``plan_targets``.
    """
    targets, notes = plan_targets(modules, request)
    plan = ShardingPlan(tuple(t.plan for t in targets), request.world_size, notes)
    return plan, targets
