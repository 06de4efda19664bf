"""Stores single parameters of a unit, apart from the other parameters of the region.

A region is saved as whole shards. When a save leaves out some of the parameters, or
tensor parallelism cuts some, each parameter gets entries of its own: a *part* per rank
that holds elements::

    rank 0   elements [0, 7) of lora_A.weight    and of its optimizer states
    rank 1   elements [7, 16)

A matrix whose columns tensor parallelism cuts is stored as the ranks hold the columns,
so that no rank sends a tensor, and the same mesh reads each part as a single interval::

    down.weight (8, 32) over 2 x 2 ranks        cuts    ((0,), (0, 16))

    tp 0   dp 0   elements [0, 64)   of the rectangle (8, 16) at (0, 0)
           dp 1   elements [64, 128)
    tp 1   dp 0   elements [0, 64)   of the rectangle (8, 16) at (0, 16)
           dp 1   elements [64, 128)

If each rectangle is an interval of the whole parameter, as rows are, parts count the
elements of the whole: a single rectangle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.contents import HeldParam, HeldRegion, HeldTensor
from composable_fsdp.storage.manifest import (
    Cut,
    CutState,
    EntryPlace,
    Json,
    require_storable,
)
from composable_fsdp.storage.rectangles import Rectangle
from composable_fsdp.storage.writer import Piece


@dataclass(slots=True)
class CutPart:
    """This rank's elements ``[start, stop)`` of a parameter, or of a rectangle."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    key: str
    """The key of the entry in the rank's file."""
    states: dict[str, tuple[torch.dtype, str]] = field(default_factory=dict)
    """Per element-wise state: the dtype and the key of the entry."""
    values: dict[str, Json] = field(default_factory=dict)
    """State that is not element-wise, encoded."""
    shared: dict[str, str] = field(default_factory=dict)
    """The same as texts, to compare over ranks."""
    rectangle: Rectangle | None = None
    """The rectangle that ``start`` and ``stop`` count in. Default None: no rectangle.
    """


class StateForms(NamedTuple):
    """Functions that tell how the optimizer state of a parameter is stored."""

    is_elementwise: Callable[[str, Any, Tensor, str], bool]
    """Whether a state (name, value) has the elements of the parameter (leaf, name)."""
    encoded: Callable[[str, Any, str], Json]
    """Returns another state as JSON."""
    text: Callable[[Any, str], str]
    """Returns a text that is equal for equal values."""


def is_whole(held: HeldRegion) -> bool:
    """Return whether the region is stored as shards: all is chosen, and no DTensor."""
    # ``Selection`` drops parameters from the tuple, and never changes the layout.
    slots = held.region.layout.parameters
    # Ranks with other experts have units of the same name, and a region each.
    if len(held.params) < len(slots) or held.handle.groups.experts_ref is not None:
        return False
    return all(slot.whole is None for slot in slots)


def cut_parts(
    params: Iterable[HeldParam | HeldTensor],
    states: Mapping[int, dict[str, Any]],
    how: StateForms,
) -> Iterator[tuple[CutPart, list[Piece]]]:
    """Yield the part and the entries of each parameter that this rank stores.

    Raises: CheckpointError, for a dtype that no file holds.
    """
    for param in params:
        # In the whole parameter where possible: a load on another mesh reads intervals.
        rectangle, (start, stop) = param.rectangle, param.interval
        if rectangle is not None:
            rectangle, start, stop = rectangle.moved(start, stop)
        # No rank holds elements of an empty parameter, and no rectangle is needed.
        if not prod(param.shape):
            rectangle = None
        # An empty parameter has no element on any rank.
        if start == stop and prod(param.shape) > 0:
            continue
        name = param.names[0]
        require_storable(param.dtype, quoted(name))
        part = CutPart(
            param.names, param.dtype, param.shape, start, stop, f"cut.{name}"
        )
        part.rectangle = rectangle
        is_first = start == 0 and (rectangle is None or not any(rectangle.offset))
        # The same memory that the region's shard has; nothing is copied here.
        pieces = [_piece(part, part.key, param.dtype, param.local)]
        for state, value in states.get(id(param.tensor), {}).items():
            if how.is_elementwise(state, value, param.leaf, name):
                require_storable(value.dtype, f"state {state!r} of {quoted(name)}")
                key = f"{part.key}.{state}"
                part.states[state] = value.dtype, key
                pieces.append(_piece(part, key, value.dtype, value))
            else:
                where = f"state {state!r} of {quoted(name)}"
                # Ranks with parts of the parameter must tell the same.
                part.shared[state] = how.text(value, where)
                # Once, because each loose tensor of the manifest has a single use.
                if is_first:
                    part.values[state] = how.encoded(state, value, name)
        yield part, pieces


def _piece(part: CutPart, key: str, dtype: torch.dtype, values: Tensor) -> Piece:
    """Return the entry of a part's elements."""
    # The values are read when the file is written, and cast as late: mixed precision
    # may hold a tensor in another dtype than the checkpoint.
    numel = part.stop - part.start
    return Piece(key, dtype, (numel,), lambda: [values.detach().to(dtype)])


Written = Sequence[tuple[int, CutPart]]
"""The parts of a parameter, with the ranks that have stored them."""


def merge_cuts(
    told: Sequence[Sequence[CutPart]],
    place: Callable[[int, str], EntryPlace],
    shifted: Callable[[Json, int], Json],
) -> tuple[Cut, ...]:
    """Return the parameters that are stored alone.

    Raises: CheckpointError, for elements that no rank or two ranks have written, or for
    optimizer state that differs.
    """
    found: dict[str, list[tuple[int, CutPart]]] = {}
    # By the first name: a rank without elements of a parameter tells nothing of it.
    for rank, parts in enumerate(told):
        for part in parts:
            found.setdefault(part.names[0], []).append((rank, part))
    for written in found.values():
        # Ranks tell only of elements that they store, so only now all is known.
        _require_alike(written)
    return tuple(_merge_cut(each, place, shifted) for each in found.values())


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


def _merge_cut(
    written: Written,
    place: Callable[[int, str], EntryPlace],
    shifted: Callable[[Json, int], Json],
) -> Cut:
    """Return the cut of a parameter; see ``merge_cuts``."""
    first = written[0][1]
    name, whole = quoted(first.names[0]), (0,) * len(first.shape)
    by_offset: dict[tuple[int, ...], list[tuple[int, CutPart]]] = {}
    for rank, part in written:
        offset = whole if part.rectangle is None else part.rectangle.offset
        by_offset.setdefault(offset, []).append((rank, part))
    cuts = tuple(tuple(sorted(set(each))) for each in zip(*by_offset, strict=True))
    ordered: list[tuple[int, CutPart]] = []
    begins: list[tuple[int, ...]] = []
    # The sizes follow from the first indices, so a missing rectangle leaves a gap.
    cut = Cut(first.names, first.dtype, first.shape, cuts, (), (), {}, {})
    for offset, expected in zip(product(*cuts), cut.rectangles(), strict=True):
        parts = sorted(by_offset.get(offset, []), key=lambda each: each[1].start)
        shapes = {
            first.shape if each.rectangle is None else each.rectangle.shape
            for _, each in parts
        }
        if shapes != {expected.shape}:
            raise CheckpointError(
                f"The rectangle {expected.shape} at {offset} of {name} was written by "
                "no rank of the save. Call save on every rank that the model is "
                "sharded and cut over."
            )
        what = name if len(by_offset) == 1 else f"the rectangle at {offset} of {name}"
        _require_cover(parts, expected.numel, what)
        ordered += parts
        begins.append(tuple(part.start for _, part in parts))
    _require_same_state(ordered)
    # The rank with the first element has told the scalars.
    rank, teller = ordered[0]
    return replace(
        cut,
        begins=tuple(begins),
        parts=tuple(place(r, part.key) for r, part in ordered),
        states={
            key: CutState(
                dtype, tuple(place(r, part.states[key][1]) for r, part in ordered)
            )
            for key, (dtype, _) in teller.states.items()
        },
        values={key: shifted(value, rank) for key, value in teller.values.items()},
    )


def _require_cover(parts: Sequence[tuple[int, CutPart]], numel: int, what: str) -> None:
    """Raise CheckpointError, unless sorted parts cover ``numel`` elements once."""
    # A gap would come back as whatever the memory holds.
    end = 0
    for rank, part in parts:
        # Two independent copies of a model write the same elements.
        if part.start != end:
            raise CheckpointError(
                f"Elements {min(end, part.start)} to {max(end, part.start)} of "
                f"{what} were written by "
                f"{'no rank' if part.start > end else f'rank {rank} and another'} of "
                "the save. Call save on every rank of one copy of the model, with the "
                "same include, exclude and trainable_only."
            )
        end = part.stop
    if end != numel:
        raise CheckpointError(
            f"Elements {end} to {numel} of {what} were written by no rank. Call save "
            "on every rank that the model is sharded over, with the same include, "
            "exclude and trainable_only."
        )


def _require_same_state(parts: Sequence[tuple[int, CutPart]]) -> None:
    """Raise CheckpointError for optimizer state that differs between the parts."""
    rank, first = parts[0]
    kinds = {name: dtype for name, (dtype, _) in first.states.items()}
    # Of a state that a rank lacks, some elements would be missing.
    for other_rank, part in parts[1:]:
        others = {name: dtype for name, (dtype, _) in part.states.items()}
        if others == kinds and part.shared == first.shared:
            continue
        raise CheckpointError(
            f"Optimizer state of {quoted(first.names[0])} differs over ranks: "
            f"{ {**kinds, **first.shared} } on rank {rank} of the save and "
            f"{ {**others, **part.shared} } on rank {other_rank}, which hold parts of "
            "the parameter. Nothing was committed. Step the same optimizer on every "
            "rank, and make its scalars equal, or pass "
            f"local=[{first.names[0]!r}], which saves each rank's own scalars."
        )
