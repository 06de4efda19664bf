"""Matrices of tests, cut to pairs."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.matrix import DOOR, ends_and_middle, pairwise

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
    """Fewer than three stay as they are."""
    assert ends_and_middle([1, 4, 5, 8, 9]) == [1, 5, 9]
    assert ends_and_middle([2, 7]) == [2, 7]
    assert ends_and_middle([3]) == [3]
