"""``python -m composable_fsdp plan``: a model without a GPU.

A command returns its report, as JSON has it, the report as text, and the exit status.
"""

from __future__ import annotations

import argparse
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import torch

from composable_fsdp.config import (
    FULL_SHARD,
    HYBRID,
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    Placement,
    ShardingStrategy,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tools import models, plan_report
from composable_fsdp.tools.activations import measure_activations
from composable_fsdp.tools.command_line import split_words
from composable_fsdp.tools.memory import Activations
from composable_fsdp.tools.models import NoSplitPolicy, guess_units
from composable_fsdp.tools.plan import plan as plan_of
from composable_fsdp.tools.plan import replan
from composable_fsdp.tools.sharding_plan import Forecast, ShardingPlan, forecast

Answer = tuple[dict[str, Any], str, int]

STRATEGIES = {s.name.strip("_").lower().replace("_", "-"): s for s in ShardingStrategy}
PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}

MOST_RANKS = 1 << 17
"""The largest world size that ``smallest_world_size`` tries."""


def plan(given: argparse.Namespace) -> Answer:
    """Make the plan, and return its report; a key that is absent was not asked for."""
    if (given.compile or given.float8) and not given.time:
        raise PlanError("--compile and --float8 need --time, as --time h100.")
    # ``--hf`` is another way to write a MODEL, which says that it is a configuration.
    if bool(given.hf) == bool(given.model):
        raise PlanError(
            "Write one MODEL: MODULE:FUNCTION or the path of a config.json; see --help."
        )
    model = models.load_model(given.hf or given.model, is_config=bool(given.hf))
    # A batch on the command line goes before inputs that the function returned.
    if given.batch:
        model = model._replace(inputs=models.inputs_for(model, given.batch))
    # On meta a cast changes dtypes and copies nothing.
    if given.dtype:
        model.module.to(getattr(torch, given.dtype))
    chosen, units_from = _units_of(model, given)
    planned = plan_of(
        model.module,
        world_size=given.world_size,
        shard_world_size=given.shard_world_size,
        **chosen,
        **_options_of(given),
    )
    saved = _activations(model, planned, given)
    found = forecast(planned, optimizer=given.optimizer, activations=saved)
    report = plan_report.report_of(found, source=model.source, units_from=units_from)
    if given.gpu_memory is not None:
        report["fit"] = fit(found, given.gpu_memory)
    if saved is not None and given.time:
        _add_time(report, found, saved, given)
    text = plan_report.text_of(report)
    if given.plot:
        plan_report.draw_memory(given.plot, found, given.gpu_memory)
        # The report says where the picture is, also in JSON.
        report["plot"] = str(given.plot)
        text += f"\n\nwrote {given.plot}"
    # Without ``--gpu-memory`` there is nothing to fit into.
    return report, text, int(not report.get("fit", {}).get("fits", True))


def _activations(
    model: models.Model, planned: ShardingPlan, given: argparse.Namespace
) -> Activations | None:
    """Return the activations of the batch, if there is a batch."""
    # The report says if activations are left out.
    if model.inputs is None:
        for option in ("checkpointing", "time"):
            if getattr(given, option):
                raise PlanError(f"--{option} needs --batch, as --batch 1x4096.")
        return None
    if models.is_sharded(model.module):
        raise PlanError(
            f"plan counts activations before sharding, and {model.source} shards its "
            "model itself. Let the function return the unsharded model and select "
            "--units, leave the batch out, or call simulate in Python."
        )
    how = {"loss": model.loss, "checkpointing": given.checkpointing}
    return measure_activations(model.module, planned, model.inputs, **how)


def _add_time(
    report: dict[str, Any],
    found: Forecast,
    saved: Activations,
    given: argparse.Namespace,
) -> None:
    """Add the estimated time of a step to the report."""
    how = {"compiled": given.compile, "float8": given.float8}
    time = found.plan.step_time(given.time, saved, optimizer=given.optimizer, **how)
    words = ["compiled" if given.compile else "eager", *["float8"] * given.float8]
    report["time"] = {
        "machine": given.time,
        "step": ", ".join(words),
        **time._asdict(),
        "tokens_per_second": time.tokens_per_second,
    }
    dtypes = [d for unit in found.plan.units for _, d in unit.with_dtypes]
    if any(each.compute.itemsize > 2 for each in dtypes):
        report["warnings"].append(
            "the estimated time counts matrix products in float32 at the speed of "
            "bfloat16; pass --param-dtype bfloat16"
        )


def _units_of(
    model: models.Model, given: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Return the policy or the units that the arguments select, and how they do."""
    classes, units = given.unit_class, given.units
    if classes and units:
        raise PlanError(
            "--units and --unit-class select all units each; give one of them."
        )
    if classes:
        text = f"modules of class {', '.join(classes)}"
        return {"policy": NoSplitPolicy(classes)}, text
    # A function of MODEL that shards has chosen its units itself.
    if not units and models.is_sharded(model.module):
        return {}, f"those that {model.source} shards"
    names, text = (units, ", ".join(units)) if units else guess_units(model.module)
    return {"units": names}, text


def _placement(text: str | None) -> Placement | None:
    """Return the placement that ``--placement`` describes. Raises: PlanError."""
    if text is None:
        return None
    # A comma without a name behind it is between dims.
    rows = [row.partition("=") for row in re.split(r",(?=\w+=)", text)]
    try:
        return Placement(**{name: tuple(split_words(dims)) for name, _, dims in rows})
    except (TypeError, PlanError) as error:
        raise PlanError(
            "--placement expects the dims of parameters, between, gradients and "
            "states, as parameters=shard,between=shard,gradients=shard,states=replicate"
            f",shard, where what is left out is whole; got {text!r}: {error}"
        ) from None


def _options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``fully_shard`` that the arguments select."""
    names = (given.param_dtype, given.reduce_dtype)
    low = MixedPrecision(*(name and getattr(torch, name) for name in names))
    found = {
        "strategy": STRATEGIES[given.strategy],
        "placement": _placement(given.placement),
        # Without a dtype there is no mixed precision, as in ``fully_shard``.
        "mixed_precision": low if low != MixedPrecision() else None,
        "cpu_offload": CPUOffload(offload_params=True) if given.cpu_offload else None,
        "backward_prefetch": PREFETCH[given.backward_prefetch],
        "block": Block[given.block.upper()],
    }
    # Without defaults, which a function that shards by itself would be asked to change.
    return {
        name: each
        for name, each in found.items()
        if each != getattr(UnitOptions(), name)
    }


def fit(found: Forecast, capacity: int) -> dict[str, Any]:
    """Return whether ``found`` fits into ``capacity`` bytes, and what else would."""
    smallest = smallest_world_size(found, capacity)
    fits = found.total <= capacity
    return {
        "capacity": capacity,
        "fits": fits,
        "smallest_world_size": smallest,
        "changes": [] if fits else _what_helps(found, capacity),
    }


def _what_helps(found: Forecast, capacity: int) -> list[dict[str, Any]]:
    """Return the changes that need less memory, and the smallest sets that fit."""

    # A step takes seconds, and many sets of changes are tried.
    @cache
    def measured(mixed: MixedPrecision | None, again: bool) -> Activations:
        assert found.activations is not None
        plan = replan(found.plan, mixed_precision=mixed) if mixed else found.plan
        return found.activations.measure(plan=plan, checkpointing=again)

    changes = _changes(found)

    def total(chosen: Sequence[str]) -> int:
        given = {n: value for each in chosen for n, value in changes[each].items()}
        kept = found.activations
        if kept is not None and {"mixed_precision", "checkpointing"} & given.keys():
            again = given.pop("checkpointing", kept.checkpointed)
            kept = measured(given.get("mixed_precision"), again)
        plan = replan(found.plan, **given)
        return replace(found, plan=plan, activations=kept).total

    # A single change is told if it helps; it is in no set if it does not.
    alone = {each: total([each]) for each in changes}
    useful = [each for each, needed in alone.items() if needed < found.total]
    sets: list[tuple[tuple[str, ...], int]]
    sets = [((each,), alone[each]) for each in useful]
    for size in range(2, len(useful) + 1):
        # If no smaller set is enough, take the sets that are.
        if any(needed <= capacity for _, needed in sets):
            break
        larger = ((each, total(each)) for each in combinations(useful, size))
        sets += [each for each in larger if each[1] <= capacity]
    return [
        {"options": " ".join(chosen), "bytes": needed, "fits": needed <= capacity}
        for chosen, needed in sets
    ]


def smallest_world_size(found: Forecast, capacity: int) -> int | None:
    """Return the smallest world size at which ``found`` fits; None if there is none."""
    groups = [u.shard_world_size for u in found.plan.units if u.replicas > 1]
    # NO_SHARD has replicas and groups of one rank. The groups keep their size, so a
    # number of ranks between two multiples is no plan.
    step = max(groups, default=1)

    def fits(count: int) -> bool:
        # Only layouts change with the world size; the model is walked once.
        plan = replan(found.plan, world_size=count * step)
        return replace(found, plan=plan).total <= capacity

    # Memory falls with the world size but for padding: double until the forecast fits,
    # then halve the interval. Many models need no sharding, so 1 is first.
    high = 1
    while not fits(high):
        high *= 2
        if high * step > MOST_RANKS:
            return None
    low = high // 2 + 1
    return step * (low + bisect_left(range(low, high), True, key=fits))


def _changes(found: Forecast) -> dict[str, dict[str, Any]]:
    """Return changes that may need less memory, those that cost least first."""
    plan, units = found.plan, found.plan.units
    options = [unit.options for unit in units]
    strategy = HYBRID[0] if any(o.strategy in HYBRID for o in options) else FULL_SHARD
    name = strategy.name.lower().replace("_", "-")
    # The command refuses both, and takes FULL_SHARD beside a placement for its default.
    only = ", without --placement" if any(o.placement for o in options) else ""
    changes: dict[str, dict[str, Any]] = {
        f"--strategy {name}{only}": {"strategy": strategy, "placement": None}
    }
    # NO_SHARD has replicas without groups, and FULL_SHARD is its change.
    if any(u.shard_world_size > 1 and u.replicas > 1 for u in units):
        changes[f"--strategy full-shard, without --shard-world-size{only}"] = {
            "strategy": FULL_SHARD,
            "placement": None,
            "shard_world_size": plan.world_size,
        }
    if any(o.mixed_precision is None for o in options):
        low = MixedPrecision(param_dtype=torch.bfloat16)
        changes["--param-dtype bfloat16"] = {"mixed_precision": low}
    changes["--backward-prefetch none"] = {"backward_prefetch": None}
    # Less padding is not worth sharded parameters of one dimension.
    if plan.padded_numel > 1.01 * plan.numel:
        changes["--block element"] = {"block": Block.ELEMENT}
    if found.activations is not None and not found.activations.checkpointed:
        changes["--checkpointing"] = {"checkpointing": True}
    changes["--cpu-offload"] = {"cpu_offload": CPUOffload(offload_params=True)}
    return changes
