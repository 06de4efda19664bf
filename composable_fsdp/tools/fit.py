"""Answers whether a model fits on a device, and what would make the model fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch

from composable_fsdp.config import (
    HYBRID,
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.tools.activations import Activations
from composable_fsdp.tools.forecast import Forecast
from composable_fsdp.tools.replan import replan

MOST_RANKS = 1 << 17
"""The largest world size that ``smallest_world_size`` tries."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the plan, and the bytes at the peak with the change.

    Args:
        text: the change, for a reader.
        total: bytes on the device at the peak.
        fits: whether the peak is within the memory of the device.
    """

    text: str
    total: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a forecast fits on a device.

    Args:
        capacity: bytes of the device.
        total: bytes at the peak.
        smallest: the smallest world size that fits, None if none up to ``MOST_RANKS``
            does.
        changes: changes that need less memory, each alone; then, if none of them is
            enough, the smallest sets of changes that fit.
    """

    capacity: int
    total: int
    smallest: int | None
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of the device."""
        return self.total <= self.capacity


def fit(found: Forecast, capacity: int) -> Fit:
    """Return whether ``found`` fits into ``capacity`` bytes, and what else would.

    Changes are listed only if the forecast does not fit.
    """
    changes = _what_helps(found, capacity) if found.total > capacity else []
    return Fit(
        capacity, found.total, smallest_world_size(found, capacity), tuple(changes)
    )


def _what_helps(found: Forecast, capacity: int) -> list[Change]:
    """Return the changes that need less memory, and the smallest sets that fit."""
    useful = _changes(found)
    changes: list[Change] = []
    for size in range(1, len(useful) + 1):
        # If no smaller set is enough, take the sets that are.
        if any(change.fits for change in changes):
            break
        for chosen in combinations(useful, size):
            changed = found
            for _, apply in chosen:
                changed = apply(changed)
            total = changed.total
            # A single change is told if it helps; it is in no set if it does not.
            if size == 1 and total >= found.total:
                useful = [each for each in useful if each is not chosen[0]]
            elif size == 1 or total <= capacity:
                text = " and ".join(text for text, _ in chosen)
                changes.append(Change(text, total, total <= capacity))
    return changes


def at_world_size(found: Forecast, world_size: int) -> Forecast:
    """Return the forecast of the same units and options on ``world_size`` ranks."""
    return replace(found, plan=replan(found.plan, world_size=world_size))


def smallest_world_size(found: Forecast, capacity: int) -> int | None:
    """Return the smallest world size at which ``found`` fits; None if there is none.

    With shard groups and replicas, only multiples of the group's size are tried.
    """
    groups = [u.shard_world_size for u in found.plan.units if u.replicas > 1]
    # NO_SHARD has replicas and groups of one rank.
    step = max(groups, default=1)

    # The groups keep their size, so a number of ranks between two multiples is no plan.
    def fits(count: int) -> bool:
        return at_world_size(found, count * step).total <= capacity

    # Memory falls with the world size but for padding: double until the forecast fits,
    # then halve the interval.
    high = 1
    # A world size of one is tried first: many models need no sharding.
    while not fits(high):
        high *= 2
        if high * step > MOST_RANKS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * step


_Apply = Callable[[Forecast], Forecast]


def _changes(found: Forecast) -> list[tuple[str, _Apply]]:
    """Return the changes that may need less memory, with a function per change."""
    plan, units = found.plan, found.plan.units
    options = [unit.options for unit in units]
    full, hybrid = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD
    strategy = hybrid if any(o.strategy in HYBRID for o in options) else full
    offload = CPUOffload(offload_params=True)
    activations = found.activations
    # In the order of what a user loses: first memory for time, at last the host.
    rows: list[tuple[bool, str, _Apply]] = [
        (
            any(o.strategy not in (full, hybrid) for o in options),
            f"strategy={strategy.name}",
            _option(strategy=strategy),
        ),
        (
            # NO_SHARD has replicas without groups, and FULL_SHARD is its change.
            any(u.shard_world_size > 1 and u.replicas > 1 for u in units),
            "one shard group of all ranks, without replicas",
            _option(shard_world_size=plan.world_size, strategy=full),
        ),
        (
            any(o.mixed_precision is None for o in options),
            "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)",
            _low_precision(found),
        ),
        (
            any(o.backward_prefetch is not None for o in options),
            "backward_prefetch=None",
            _option(backward_prefetch=None),
        ),
        (
            # Less padding is not worth sharded parameters of one dimension.
            plan.padded_numel > 1.01 * plan.numel,
            "block=Block.ELEMENT",
            _option(block=Block.ELEMENT),
        ),
        (
            activations is not None and not activations.checkpointed,
            "activation checkpointing of each unit",
            _checkpoint,
        ),
        (
            not all(unit.is_offloaded for unit in units),
            "cpu_offload=CPUOffload(offload_params=True)",
            _option(cpu_offload=offload),
        ),
    ]
    return [(text, apply) for holds, text, apply in rows if holds]


def _option(**changes: Any) -> _Apply:
    """Return a function that replaces options of every unit."""
    return lambda found: replace(found, plan=replan(found.plan, **changes))


def _low_precision(found: Forecast) -> _Apply:
    """Return a function that makes every unit compute in bfloat16."""
    low = MixedPrecision(param_dtype=torch.bfloat16)

    # Measured once: a forward takes seconds, and many sets of changes are tried.
    @cache
    def measured() -> Activations | None:
        saved = found.activations
        plan = replan(found.plan, mixed_precision=low)
        return None if saved is None else saved.measured_for(plan)

    def apply(changed: Forecast) -> Forecast:
        plan = replan(changed.plan, mixed_precision=low)
        saved, activations = measured(), changed.activations
        if saved is not None and activations is not None:
            activations = replace(saved, checkpointed=activations.checkpointed)
        return replace(changed, plan=plan, activations=activations)

    return apply


def _checkpoint(found: Forecast) -> Forecast:
    """Return the forecast with activation checkpointing of each unit."""
    # ``_changes`` asks only where activations are known.
    if found.activations is None:
        return found
    return replace(found, activations=found.activations.with_checkpointing())
