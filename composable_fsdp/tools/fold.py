"""Folds equal units into rows, so that a plan of 126 equal blocks has a row for all.

::

    (root)   blocks.0   blocks.1   ...   blocks.23   ->   (root)   blocks.0-23, 24 x

Units are equal if they have equal classes, regions, options and ranks, and if their
names differ in numbers only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.unit_plan import UnitPlan


class Fold(NamedTuple):
    """Equal units.

    Args:
        name: the names of all units, such as "blocks.0-23".
        unit: the first of the units.
        indices: the places of the units in the plan.
    """

    name: str
    unit: UnitPlan
    indices: tuple[int, ...]

    @property
    def times(self) -> int:
        """Number of units."""
        return len(self.indices)


def fold_units(units: Sequence[UnitPlan]) -> list[Fold]:
    """Return the units in groups of equal units, in the order of the first units."""
    groups: dict[Hashable, list[int]] = {}
    for index, unit in enumerate(units):
        pattern = tuple("#" if p.isdigit() else p for p in unit.fqn.split("."))
        # Layouts compare by value, so blocks built apart are equal, too.
        key = (
            pattern,
            unit.class_name,
            unit.regions,
            unit.options,
            unit.shard_world_size,
            unit.replicas,
        )
        groups.setdefault(key, []).append(index)
    return [
        Fold(
            _common_name([units[i].fqn for i in indices]),
            units[indices[0]],
            tuple(indices),
        )
        for indices in groups.values()
    ]


def _common_name(fqns: Sequence[str]) -> str:
    """Return a name for units whose names differ in numbers only.

    >>> _common_name(["blocks.0", "blocks.1", "blocks.2", "blocks.4"])
    'blocks.0-2,4'
    """
    if len(fqns) == 1:
        return fqns[0] or ROOT_NAME
    # Equal patterns have equal numbers of components.
    columns = list(zip(*(fqn.split(".") for fqn in fqns), strict=True))
    several = [len(set(column)) for column in columns]
    # The ranges of several numbers name all combinations: write them only if all
    # combinations are there.
    exact = prod(several) == len(fqns)
    # Components that are equal in all names stay as they are.
    return ".".join(
        column[0] if count == 1 else _ranges(map(int, column)) if exact else "*"
        for column, count in zip(columns, several, strict=True)
    )


def _ranges(numbers: map[int]) -> str:
    """Return distinct numbers as text, runs as "first-last"."""
    runs = [
        [number for _, number in run]
        # In a run, number and position grow together.
        for _, run in groupby(
            enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]
        )
    ]
    return ",".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )
