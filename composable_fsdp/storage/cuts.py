"""Stores single parameters of a unit, if a save writes only some of the region.

A region is saved as whole shards. When a save leaves out some of the parameters, each
chosen parameter gets entries of its own: a *part* per rank that holds elements::

    rank 0   elements [0, 7) of lora_A.weight    and of its optimizer states
    rank 1   elements [7, 16)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.contents import HeldRegion
from composable_fsdp.storage.manifest import (
    Cut,
    CutState,
    EntryPlace,
    Json,
    require_storable,
)
from composable_fsdp.storage.writer import Piece


@dataclass(slots=True)
class CutPart:
    """This rank's elements ``[start, stop)`` of a parameter."""

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


class StateForms(NamedTuple):
    """Functions that tell how the optimizer state of a parameter is stored."""

    is_elementwise: Callable[[str, Any, Tensor, str], bool]
    """Whether a state (name, value) has the elements of the parameter (leaf, name)."""
    encoded: Callable[[str, Any, str], Json]
    """Returns another state as JSON."""
    text: Callable[[Any, str], str]
    """Returns a text that is equal for equal values."""


def is_whole(held: HeldRegion) -> bool:
    """Return whether all parameters of the region are chosen."""
    # ``Selection`` drops parameters from the tuple, and never changes the layout.
    return len(held.params) == len(held.region.layout.parameters)


def cut_parts(
    held: HeldRegion, states: Mapping[int, dict[str, Any]], how: StateForms
) -> Iterator[tuple[CutPart, list[Piece]]]:
    """Yield the part and the entries of each chosen parameter on this rank.

    Args:
        held: the region with the chosen parameters.
        states: the optimizer state, by the ``id`` of the parameter.
        how: tells how a state is stored.

    Raises: CheckpointError, for a dtype that no file holds.
    Collective: none.
    """
    for param in held.params:
        start, stop = param.interval
        # An empty parameter has no element on any rank, and is told by the first.
        is_empty = param.ref.slot.numel == 0
        if start == stop and not (is_empty and held.handle.groups.is_first):
            continue
        name = param.names[0]
        require_storable(param.dtype, quoted(name))
        part = CutPart(
            param.names, param.dtype, param.shape, start, stop, f"cut.{name}"
        )
        # The same memory that the region's shard has; nothing is copied here.
        pieces = [_piece(part, part.key, param.dtype, param.local)]
        for state, value in states.get(id(param.tensor), {}).items():
            if how.is_elementwise(state, value, param.ref.leaf, name):
                require_storable(value.dtype, f"state {state!r} of {quoted(name)}")
                key = f"{part.key}.{state}"
                part.states[state] = value.dtype, key
                pieces.append(_piece(part, key, value.dtype, value))
            else:
                where = f"state {state!r} of {quoted(name)}"
                # Ranks with parts of the parameter must tell the same.
                part.shared[state] = how.text(value, where)
                # Once, because each loose tensor of the manifest has a single use.
                if start == 0:
                    part.values[state] = how.encoded(state, value, name)
        yield part, pieces


def _piece(part: CutPart, key: str, dtype: torch.dtype, values: Tensor) -> Piece:
    """Return the entry of a part's elements."""
    return Piece(key, dtype, (part.stop - part.start,), lambda: [values])


def merge_cuts(
    told: Sequence[tuple[Sequence[CutPart], Callable[[str], EntryPlace]]],
    shifted: Callable[[Json, int], Json],
) -> tuple[Cut, ...]:
    """Return the cuts of all ranks.

    Args:
        told: per rank the parts, and a function that returns the place of an entry.
        shifted: returns a JSON value of a rank for the manifest.

    Raises: CheckpointError, for elements that no rank or two ranks have written, or for
    optimizer state that differs.
    Collective: none.
    """
    found: dict[str, list[tuple[int, CutPart]]] = {}
    # By the first name: a rank without elements of a parameter tells nothing of it.
    for rank, (parts, _) in enumerate(told):
        for part in parts:
            found.setdefault(part.names[0], []).append((rank, part))
    cuts = []
    for written in found.values():
        # In the order of the elements, which is the order of the unit's ranks.
        written.sort(key=lambda each: each[1].start)
        _require_cover(written)
        _require_same_state(written)
        rank, first = written[0]
        cuts.append(
            Cut(
                first.names,
                first.dtype,
                first.shape,
                tuple(part.start for _, part in written),
                tuple(told[r][1](part.key) for r, part in written),
                {
                    name: CutState(
                        dtype,
                        tuple(told[r][1](part.states[name][1]) for r, part in written),
                    )
                    for name, (dtype, _) in first.states.items()
                },
                {name: shifted(value, rank) for name, value in first.values.items()},
            )
        )
    return tuple(cuts)


def _require_cover(parts: Sequence[tuple[int, CutPart]]) -> None:
    """Raise CheckpointError, unless the parts cover the parameter once."""
    # A gap would come back as whatever the memory holds.
    end, (_, first) = 0, parts[0]
    for rank, part in parts:
        # Two independent copies of a model write the same elements.
        if part.start != end:
            raise CheckpointError(
                f"Elements {min(end, part.start)} to {max(end, part.start)} of "
                f"{quoted(first.names[0])} were written by "
                f"{'no rank' if part.start > end else f'rank {rank} and another'} of "
                "the save. Call save on every rank of one copy of the model, with the "
                "same include, exclude and trainable_only."
            )
        end = part.stop
    if end != prod(first.shape):
        raise CheckpointError(
            f"Elements {end} to {prod(first.shape)} of {quoted(first.names[0])} were "
            "written by no rank. Call save on every rank that the model is sharded "
            "over, with the same include, exclude and trainable_only."
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
