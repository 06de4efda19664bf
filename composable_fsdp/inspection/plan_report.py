"""A plan as one dict of numbers: what ``--json`` prints and all other forms show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composable_fsdp.tools.fit import Fit, at_world_size, fit
from composable_fsdp.tools.forecast import Forecast, UnitRow
from composable_fsdp.tools.sharding_plan import ShardingPlan, owner_lines
from composable_fsdp.tools.unit_costs import Traffic

Report = dict[str, Any]
"""The numbers of a plan, as JSON has them."""

KEY = "composable_fsdp_plan"
"""The key that tells a saved report; the value is the version of the report."""

KINDS = {
    "parameters": "parameters, sharded",
    "gradients": "gradients, sharded",
    "optimizer": "optimizer state",
    "full": "full parameters in use",
    "ahead": "all-gathers in flight",
    "reduce": "reduction buffers",
    "in_flight": "gradients not reduced yet",
    "activations": "activations",
    "temporaries": "temporaries",
}
"""Kinds of memory, with the words that a reader sees."""


def report_of(
    found: Forecast,
    *,
    source: str,
    units_from: str,
    capacity: int | None = None,
    world_sizes: Sequence[int] = (),
    tensor_parallel_size: int | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Return the numbers of a forecast.

    Returns: a dict of texts, numbers, lists and dicts. Bytes are per rank.
    Raises: PlanError, if a world size is not possible.
    """
    plan = found.plan
    rows = [_row(row) for row in found.rows]
    peak = found.peak
    activations = found.activations
    cut = tensor_parallel_size or 1
    report: Report = {
        KEY: 1,
        "model": {
            "source": source,
            "class": plan.units[0].class_name,
            "parameters": plan.numel,
            **_whole(plan),
            "trainable": sum(sum(unit.trainable.values()) for unit in plan.units),
            "units": len(plan.units),
            "units_from": units_from,
        },
        "options": _options(found) | _ranks(found, tensor_parallel_size),
        "rows": rows,
        "total": _total(rows),
        "peak": {
            "when": peak.when,
            "bytes": peak.memory.total,
            "kinds": peak.memory.by_kind(),
            "activations_of": activations.batch if activations else None,
        },
        "host_bytes": found.host_bytes,
        "save_bytes": found.save_bytes,
        "step": _traffic(plan.traffic),
        "owners": owner_lines(plan),
        "warnings": [*notes, *plan.warnings],
    }
    # A key that is absent was not asked for.
    if capacity is not None:
        report["fit"] = _fit(fit(found, capacity), cut)
    # Only layouts change with the world size; the model is walked once.
    if world_sizes:
        report["world_sizes"] = [
            _at(at_world_size(found, size // cut), capacity) | {"world_size": size}
            for size in world_sizes
        ]
    return report


def _whole(plan: ShardingPlan) -> Report:
    """Return the number of parameters of the whole model, if a rank has less."""
    whole = plan.whole_numel
    return {"whole_parameters": whole} if whole != plan.numel else {}


def _ranks(found: Forecast, tensor_parallel_size: int | None) -> Report:
    """Return the numbers of ranks: in all, and of each dim of the mesh."""
    # The root of a hybrid plan may be unsharded; the units below tell the groups.
    groups = max(found.plan.units, key=lambda unit: unit.shard_world_size)
    return {
        "world_size": found.plan.world_size * (tensor_parallel_size or 1),
        "shard_world_size": groups.shard_world_size,
        "replicas": groups.replicas,
        "tensor_parallel_size": tensor_parallel_size,
    }


def _options(found: Forecast) -> Report:
    """Return the options of the plan, the root's where units differ."""
    root = found.plan.units[0]
    options, mixed = root.options, root.options.mixed_precision
    prefetch = options.backward_prefetch
    activations = found.activations

    # JSON has no dtypes: their names without "torch.".
    def dtype(name: str) -> str | None:
        value = getattr(mixed, name, None)
        return None if value is None else str(value).removeprefix("torch.")

    return {
        "strategy": options.strategy.name,
        "dtypes": sorted(
            {
                str(region.dtype).removeprefix("torch.")
                for unit in found.plan.units
                for region in unit.regions
            }
        ),
        "param_dtype": dtype("param_dtype"),
        "reduce_dtype": dtype("reduce_dtype"),
        "cpu_offload": root.is_offloaded,
        "backward_prefetch": None if prefetch is None else prefetch.name,
        "forward_prefetch": options.forward_prefetch,
        "block": str(options.block).removeprefix("Block."),
        "wire": None if options.wire is None else repr(options.wire),
        "arena": None if options.arena is None else repr(options.arena),
        "optimizer": found.optimizer.name,
        "checkpointing": bool(activations and activations.checkpointed),
    }


def _row(row: UnitRow) -> Report:
    """Return the numbers of equal units."""
    return {
        "unit": row.fold.name,
        "times": row.fold.times,
        "class": row.fold.unit.class_name,
        "numel": row.numel,
        "padded_numel": row.padded_numel,
        "parameters": row.parameters,
        "gradients": row.gradients,
        "optimizer": row.optimizer,
        "sharded": row.sharded,
        "full": row.full,
        **_traffic(row.traffic),
    }


_SUMMED = (
    "times",
    "numel",
    "padded_numel",
    "parameters",
    "gradients",
    "optimizer",
    "sharded",
)


def _total(rows: Sequence[Report]) -> Report:
    """Return the sums of the columns; of ``full`` the largest, as units take turns."""
    return {
        **{name: sum(row[name] for row in rows) for name in _SUMMED},
        "full": max(row["full"] for row in rows),
    }


def _traffic(traffic: Traffic) -> Report:
    """Return calls and bytes of each kind of collective."""
    return {
        name: {
            "calls": getattr(traffic, f"{name}_calls"),
            "bytes": getattr(traffic, f"{name}_bytes"),
        }
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    }


def _fit(found: Fit, cut: int) -> Report:
    """Return whether the plan fits, and what would make it fit.

    ``cut`` ranks hold the parts of the model of a rank of the plan.
    """
    return {
        "capacity": found.capacity,
        "fits": found.fits,
        "smallest_world_size": found.smallest and cut * found.smallest,
        "changes": [
            {"change": change.text, "bytes": change.total, "fits": change.fits}
            for change in found.changes
        ],
    }


def _at(found: Forecast, capacity: int | None) -> Report:
    """Return the row of a world size."""
    plan = found.plan
    row: Report = {
        "world_size": plan.world_size,
        "padding": plan.padded_numel - plan.numel,
        "parameters": plan.parameter_bytes,
        "gradients": plan.gradient_bytes,
        "optimizer": sum(each.optimizer for each in found.rows),
        "peak": found.total,
        "when": found.peak.when,
    }
    if capacity is not None:
        row["fits"] = found.total <= capacity
    return row
