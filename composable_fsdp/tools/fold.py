"""Folds equal units into rows: ``blocks.0`` to ``blocks.23`` are ``blocks.0-23``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from composable_fsdp.naming import ROOT_NAME, runs_of
from composable_fsdp.planning.unit_plan import UnitPlan


class Fold(NamedTuple):
    """Equal units: the names of all, such as "blocks.0-23", the first, their places."""

    name: str
    unit: UnitPlan
    indices: tuple[int, ...]

    @property
    def times(self) -> int:
        """Number of units."""
        return len(self.indices)


def fold_units(units: Sequence[UnitPlan]) -> list[Fold]:
    """Return the units in groups of those that are equal but for numbers in names."""
    groups: dict[Hashable, list[int]] = {}
    for index, unit in enumerate(units):
        pattern = ".".join("#" if p.isdigit() else p for p in unit.fqn.split("."))
        # Layouts compare by value, so blocks built apart are equal, too.
        groups.setdefault(replace(unit, fqn=pattern), []).append(index)
    return [
        Fold(_common_name([units[i].fqn for i in all_]), units[all_[0]], tuple(all_))
        for all_ in groups.values()
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
        column[0]
        if count == 1
        else ",".join(runs_of(map(int, column)))
        if exact
        else "*"
        for column, count in zip(columns, several, strict=True)
    )
