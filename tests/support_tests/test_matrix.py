"""Matrices of tests, cut to pairs."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.matrix import DOOR, mixed, pairwise, spread, thin

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def grid(sizes: list[int], names: str = "abcd") -> list[dict[str, int]]:
    """Return every combination."""
    return [
        dict(zip(names, values, strict=False)) for values in product(*map(range, sizes))
    ]


@given(sizes=SIZES)
def test_every_pair_of_values_stands_in_a_kept_combination(sizes: list[int]) -> None:
    """And every value of a single factor."""
    cells = grid(sizes)

    kept = [cells[i] for i in pairwise(cells)] or cells

    for a, b in combinations(cells[0], 2):
        pairs = {(cell[a], cell[b]) for cell in cells}
        assert {(cell[a], cell[b]) for cell in kept} == pairs
    for name in cells[0]:
        assert {cell[name] for cell in kept} == {cell[name] for cell in cells}


def test_the_door_takes_each_value_once_and_no_pairs() -> None:
    """Two doors and three worlds run three times; a third factor is paired as usual."""
    cells = [
        {DOOR: path, "world_size": size} for path, size in product(range(2), range(3))
    ]
    assert len(pairwise(cells)) == 3
    more = [{**cell, "name": name} for cell in cells for name in range(4)]
    assert len(pairwise(more)) == 12
    assert len(pairwise(more, ["name", DOOR])) == 4


def test_values_of_one_decorator_are_one_factor() -> None:
    """Nine combinations of two decorators, of which one sets two arguments."""
    cells = [{"a": i, "b": i, "c": j} for i, j in product(range(3), range(3))]

    assert pairwise(cells) == list(range(9))


def test_few_combinations_are_the_ends_and_the_middle() -> None:
    """Fewer than asked for stay as they are."""
    assert spread([1, 4, 5, 8, 9]) == [1, 5, 9]
    assert spread([2, 7]) == [2, 7]
    assert spread([3]) == [3]
    assert spread("abcdefgh", 2) == ["a", "h"]
    assert spread("abcdefgh", 1) == ["h"]
    assert spread("abcdefgh", 5) == ["a", "c", "e", "g", "h"]


class Item:
    """What `thin` reads of a test that pytest has collected."""

    def __init__(self, name: str, size: object = None, **markers: tuple[Any, ...]):
        self.path, self.nodeid = "test_file.py", name
        if size is not None:
            self.callspec = SimpleNamespace(params={"size": size})
        self._markers = {
            k: getattr(pytest.mark, k)(*v).mark for k, v in markers.items()
        }

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """The marker of this name, if there is one."""
        return self._markers.get(name)


def test_a_test_on_ranks_runs_each_value_once() -> None:
    """Unless it asks for pairs; a test without ranks runs the pairs."""
    numbers = list(map(str, range(3)))
    for fixtures, markers, expected in (
        (["ranks"], {}, 3),
        (["ranks"], {"pairs": ()}, 9),
        ([], {}, 9),
    ):
        items: Any = [
            Item(f"some[{a}{b}]", a, **markers) for a in numbers for b in numbers
        ]
        for item, b in zip(items, numbers * 3, strict=True):
            item.callspec.params["other"], item.fixturenames = b, fixtures
        assert len(thin(items)[0]) == expected


def test_markers_leave_cases_to_the_full_matrix() -> None:
    """A test, a value, and all but some of the others."""
    sizes = [f"size {n}" for n in range(5)]
    items: Any = [Item(f"some[{each}]", each, few=(2,)) for each in sizes]
    items.append(Item("some[large]", "large", few=(2,), full_matrix=("some",)))
    items += [Item("alone", full_matrix=("some",)), Item("plain")]

    kept, left_out = thin(items)

    assert kept == [items[0], items[4], items[7]]
    assert left_out == [*items[1:4], *items[5:7]]


def test_files_that_wait_are_spread_over_the_others() -> None:
    """In order, each file as a whole."""
    names = ["w/1::a", "w/1::b", "w/2::a", "x::a", "x::b", "y::a", "z::a", "u::a"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]

    found = [item.nodeid for item in mixed(items, "w/")]

    assert found == [
        *("x::a", "x::b", "w/1::a", "w/1::b"),
        *("y::a", "z::a", "w/2::a", "u::a"),
    ]
    assert mixed(items[3:], "w/") == items[3:]
    assert mixed(items[:3], "w/") == items[:3]
