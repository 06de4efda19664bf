"""Answers whether a model fits on a device, and what would make the model fit."""

from __future__ import annotations

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
    Block,
    CPUOffload,
    MixedPrecision,
)
from composable_fsdp.tools.memory import Activations
from composable_fsdp.tools.plan import replan
from composable_fsdp.tools.sharding_plan import Forecast

MOST_RANKS = 1 << 17
"""The largest world size that ``smallest_world_size`` tries."""


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

    useful = list(changes)
    helps: list[dict[str, Any]] = []
    for size in range(1, len(useful) + 1):
        # If no smaller set is enough, take the sets that are.
        if any(each["fits"] for each in helps):
            break
        for chosen in combinations(useful, size):
            needed = total(chosen)
            fits = needed <= capacity
            # A single change is told if it helps; it is in no set if it does not.
            if size == 1 and needed >= found.total:
                useful = [each for each in useful if each != chosen[0]]
            elif size == 1 or fits:
                told = {"options": " ".join(chosen), "bytes": needed, "fits": fits}
                helps.append(told)
    return helps


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
    """Return changes that may need less memory, those that cost least first.

    Options of the command, with the arguments of ``replan``.
    """
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
