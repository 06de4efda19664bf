"""Test matrices cut to pairs: nearly all faults show with one value or a pair of them.

Of several ``parametrize`` decorators the everyday run keeps as many combinations as
bring every pair of values together once; of the door, and of tests on ranks, as many as
have each value. ``few`` keeps some of these, and ``--full-matrix`` runs all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

DOOR = "path"
"""The argument that chooses between ``fully_shard`` and the wrapper."""

Value = TypeVar("Value")

Cell = dict[str, int]
"""A combination: a number for the value that each argument has."""


def pairwise(cells: Sequence[Cell], alone: Collection[str] = (DOOR,)) -> list[int]:
    """Return the numbers of the cells to keep: they hold all values and pairs.

    Arguments that always change together (one decorator) are one factor.
    """
    factors = _factors(cells)
    wanted = [set(_combined(cell, factors, alone)) for cell in cells]
    left = set().union(*wanted)
    kept: list[int] = []
    while left:
        best = max(range(len(cells)), key=lambda i: len(wanted[i] & left))
        left -= wanted[best]
        kept.append(best)
    return sorted(kept)


def _factors(cells: Sequence[Cell]) -> list[str]:
    """The arguments that change, without those that another one changes with."""
    columns: dict[tuple[int, ...], str] = {}
    for name in cells[0]:
        column = tuple(cell[name] for cell in cells)
        if len(set(column)) > 1:
            columns.setdefault(column, name)
    return list(columns.values())


def _combined(
    cell: Cell, factors: Sequence[str], alone: Collection[str]
) -> Iterator[Hashable]:
    for name in factors:
        yield name, cell[name]
    for a, b in combinations(factors, 2):
        if a not in alone and b not in alone:
            yield a, cell[a], b, cell[b]


def thin(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items to run, in order, and the items left out."""
    families: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        families.setdefault((str(item.path), _function(item)), []).append(item)
    kept: set[int] = set()
    for family in families.values():
        cells = [cell for item in family if (cell := _cell(item)) is not None]
        is_matrix = len(cells) == len(family)
        is_matrix &= all(cell.keys() == cells[0].keys() for cell in cells)
        chosen = pairwise(cells, _alone(family[0], cells)) if is_matrix else []
        few = family[0].get_closest_marker("few")
        if chosen and few:
            chosen = spread(chosen, *few.args)
        kept.update(id(family[i]) for i in chosen or range(len(family)))
    return (
        [item for item in items if id(item) in kept],
        [item for item in items if id(item) not in kept],
    )


def mixed(items: Sequence[pytest.Item], folder: str) -> list[pytest.Item]:
    """Return ``items`` with the files of ``folder`` spread evenly over the others.

    Tests of faults mostly wait. Side by side, they would leave the processors idle.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    waiting = [name for name in files if name.startswith(folder)]
    others = [name for name in files if not name.startswith(folder)]
    places = [(i / len(others), 0, name) for i, name in enumerate(others)]
    places += [(i / len(waiting), 1, name) for i, name in enumerate(waiting)]
    return [item for *_, name in sorted(places) for item in files[name]]


def _alone(item: pytest.Item, cells: Sequence[Cell]) -> Collection[str]:
    """The arguments of ``item``, of which ``cells`` are all, that are in no pair."""
    on_ranks = "ranks" in getattr(item, "fixturenames", ())
    return cells[0].keys() if on_ranks else (DOOR,)


def spread(cells: Sequence[Value], number: int = 3) -> list[Value]:
    """Return ``number`` of ``cells``, as far apart as possible, with both ends."""
    if number >= len(cells):
        return list(cells)
    if number == 1:
        return [cells[-1]]
    steps = number - 1
    return [*(cells[i * len(cells) // steps] for i in range(steps)), cells[-1]]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _cell(item: pytest.Item) -> Cell | None:
    """The values' identities: all cells of a test share the objects of a decorator."""
    spec = getattr(item, "callspec", None)
    return None if spec is None else {name: id(v) for name, v in spec.params.items()}
