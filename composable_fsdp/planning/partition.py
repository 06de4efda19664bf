"""Packing parameters into one buffer, and the cheapest partition of block classes.

Taking the best set partition of a few classes by dynamic programming over subsets is
exact for the stated cost; a unit has few classes (rows of one or two widths, and single
elements).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

SHARD_ALIGNMENT = 16
"""Bytes to which every shard and every full leaf is aligned."""

EXACT_CLASSES = 8
"""Up to this many block classes the partition is optimal; above, merged greedily."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Offsets of the members in the order given, and the shard size they lead to."""

    offsets: tuple[int, ...]
    shard_numel: int
    block: int
    padding: int


Members = tuple[tuple[int, int], ...]  # (numel, block) of each


@lru_cache(maxsize=4096)
def pack(members: Members, itemsize: int, world_size: int) -> Packing:
    """Place the members one after the other, wide blocks first, for few gaps."""
    align = max(SHARD_ALIGNMENT // itemsize, 1)
    order = sorted(range(len(members)), key=lambda i: (-members[i][1], i))
    offsets = [0] * len(members)
    end, grid = 0, align
    for i in order:
        numel, block = members[i]
        offsets[i] = _round_up(end, _lcm(block, align))
        end = offsets[i] + numel
        grid = _lcm(grid, block) if numel else grid
    shard_numel = _round_up(-(-end // world_size), grid)
    padding = shard_numel * world_size - sum(numel for numel, _ in members)
    return Packing(tuple(offsets), shard_numel, grid, padding)


@lru_cache(maxsize=4096)
def partition(
    members: Members, itemsize: int, world_size: int, launch_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Indices of the members of each region, regions by their first member."""
    classes: dict[int, list[int]] = {}
    for i, (_, block) in enumerate(members):
        classes.setdefault(block, []).append(i)
    sets = list(classes.values())

    def cost(indices: Sequence[int]) -> int:
        packing = pack(tuple(members[i] for i in indices), itemsize, world_size)
        return packing.padding * itemsize + launch_bytes

    def merged(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
        return tuple(sorted(i for part in parts for i in part))

    if len(sets) == 1:
        return (merged(sets),)
    exact = len(sets) <= EXACT_CLASSES
    chosen = _exact(sets, cost, merged) if exact else _greedy(sets, cost, merged)
    return tuple(sorted(chosen))


_Cost = Callable[[Sequence[int]], int]
_Merge = Callable[[Iterable[Sequence[int]]], tuple[int, ...]]


def _exact(sets: list[list[int]], cost: _Cost, merged: _Merge) -> list[tuple[int, ...]]:
    """Cheapest set partition, by dynamic programming over subsets of classes."""
    full = (1 << len(sets)) - 1
    groups = {
        mask: merged(sets[i] for i in range(len(sets)) if mask >> i & 1)
        for mask in range(1, full + 1)
    }
    price = {mask: cost(indices) for mask, indices in groups.items()}
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for mask in range(1, full + 1):
        low = mask & -mask
        part = mask
        options = []
        while part:
            if part & low:
                rest = best[mask ^ part]
                options.append((price[part] + rest[0], (part, *rest[1])))
            part = (part - 1) & mask
        best[mask] = min(options)
    return [groups[part] for part in best[full][1]]


def _greedy(
    sets: list[list[int]], cost: _Cost, merged: _Merge
) -> list[tuple[int, ...]]:
    """Merge the pair of groups that saves most until no merge saves anything."""
    groups = [merged([part]) for part in sets]
    while len(groups) > 1:
        savings = [
            (cost(a) + cost(b) - cost(merged([a, b])), i, j)
            for i, a in enumerate(groups)
            for j, b in enumerate(groups[:i])
        ]
        saved, i, j = max(savings, key=lambda item: item[0])
        if saved <= 0:
            break
        both = merged([groups[i], groups[j]])
        groups = [g for k, g in enumerate(groups) if k not in (i, j)] + [both]
    return groups


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _lcm(a: int, b: int) -> int:
    return a * b // gcd(a, b)
