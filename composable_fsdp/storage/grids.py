"""Merges the rectangles of parameters that tensor parallelism cuts, on rank 0.

A matrix whose columns are cut is stored as the ranks hold the columns, so that no rank
sends a tensor, and the same mesh reads each part as a single interval of a file::

    down.weight (8, 32) over 2 x 2 ranks        cuts    ((0,), (0, 16))

    tp 0   dp 0   elements [0, 64)   of the rectangle (8, 16) at (0, 0)
           dp 1   elements [64, 128)
    tp 1   dp 0   elements [0, 64)   of the rectangle (8, 16) at (0, 16)
           dp 1   elements [64, 128)

Matrices whose rows are cut are stored as plain cuts: their rectangles are intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.cuts import (
    CutPart,
    merge_cut,
    merged_states,
    require_cover,
    require_same_state,
)
from composable_fsdp.storage.manifest import Cut, EntryPlace, Grid, Json

Written = Sequence[tuple[int, CutPart]]
"""The parts of a parameter, with the ranks that have stored them."""


def merge_parts(
    told: Sequence[Sequence[CutPart]],
    place: Callable[[int, str], EntryPlace],
    shifted: Callable[[Json, int], Json],
) -> tuple[tuple[Cut, ...], tuple[Grid, ...]]:
    """Return the parameters that are stored alone: as intervals, and as rectangles.

    Args:
        told: the parts of each rank.
        place: returns the place of an entry of a rank.
        shifted: returns a JSON value of a rank for the manifest.

    Raises: CheckpointError, for elements that no rank or two ranks have written, or for
    optimizer state that differs.
    Collective: none.
    """
    found: dict[str, list[tuple[int, CutPart]]] = {}
    # By the first name: a rank without elements of a parameter tells nothing of it.
    for rank, parts in enumerate(told):
        for part in parts:
            found.setdefault(part.names[0], []).append((rank, part))
    cuts, grids = [], []
    for written in found.values():
        # Ranks tell only of elements that they store, so only now all is known.
        _require_alike(written)
        if written[0][1].rectangle is None:
            cuts.append(merge_cut(written, place, shifted))
        else:
            grids.append(_merge_grid(written, place, shifted))
    return tuple(cuts), tuple(grids)


def _require_alike(written: Written) -> None:
    """Raise CheckpointError if ranks have stored a parameter in different ways."""
    rank, first = written[0]
    for other, part in written[1:]:
        # Meshes of different placements: no rank knows the values of all elements.
        if (part.rectangle is None) != (first.rectangle is None) or (
            part.shape,
            part.dtype,
        ) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{quoted(first.names[0])} is cut differently on ranks {rank} and "
                f"{other} of the save; expected the same shape, dtype and placements "
                "on all ranks. Nothing was committed. Call parallelize_module alike "
                "on all ranks."
            )


def _merge_grid(
    written: Written,
    place: Callable[[int, str], EntryPlace],
    shifted: Callable[[Json, int], Json],
) -> Grid:
    """Return the grid of a parameter; see ``merge_parts``."""
    first = written[0][1]
    name = quoted(first.names[0])
    by_offset: dict[tuple[int, ...], list[tuple[int, CutPart]]] = {}
    for rank, part in written:
        assert part.rectangle is not None
        by_offset.setdefault(part.rectangle.offset, []).append((rank, part))
    cuts = tuple(tuple(sorted(set(each))) for each in zip(*by_offset, strict=True))
    ordered: list[tuple[int, CutPart]] = []
    begins: list[tuple[int, ...]] = []
    # The sizes follow from the first indices, so a missing rectangle leaves a gap.
    grid = Grid(first.names, first.dtype, first.shape, cuts, (), (), {}, {})
    for offset, expected in zip(product(*cuts), grid.rectangles(), strict=True):
        parts = sorted(by_offset.get(offset, []), key=lambda each: each[1].start)
        shapes = {each.rectangle.shape for _, each in parts if each.rectangle}
        if shapes != {expected.shape}:
            raise CheckpointError(
                f"The rectangle {expected.shape} at {offset} of {name} was written by "
                "no rank of the save. Call save on every rank that the model is "
                "sharded and cut over."
            )
        require_cover(parts, expected.numel, f"the rectangle at {offset} of {name}")
        ordered += parts
        begins.append(tuple(part.start for _, part in parts))
    require_same_state(ordered)
    # The rank with the first element has told the scalars.
    rank, teller = ordered[0]
    return Grid(
        first.names,
        first.dtype,
        first.shape,
        cuts,
        tuple(begins),
        tuple(place(r, part.key) for r, part in ordered),
        merged_states(ordered, place),
        {key: shifted(value, rank) for key, value in teller.values.items()},
    )
