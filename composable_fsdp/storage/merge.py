"""Describes the file of a rank, and merges those of all ranks into the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.manifest import (
    BLOCK,
    EntryPlace,
    File,
    Json,
    Local,
    Manifest,
    SavedState,
    SavedTensor,
    Span,
    Stored,
    require_storable,
)
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import Piece


@dataclass(slots=True)
class TensorPart:
    """The elements of a tensor that this rank writes."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    span: Span
    number: int
    states: dict[str, torch.dtype] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)
    """State that is not element-wise, encoded, where this rank writes it."""
    shared: dict[str, str] = field(default_factory=dict)
    """The same as texts, to compare over ranks that hold other elements."""

    @property
    def offset(self) -> tuple[int, ...]:
        """The first index of the rectangle in each dim."""
        box = self.span.rectangle
        return (0,) * len(self.shape) if box is None else box.offset

    @property
    def is_whole(self) -> bool:
        """Whether this rank writes the whole tensor."""
        return self.span == (0, prod(self.shape), None)

    def key(self, state: str | None = None) -> str:
        """Return the key of the entry in the rank's file."""
        name = f"tensor.{self.names[0]}"
        return name if state is None else f"{name}.{state}"


@dataclass(slots=True)
class FilePart:
    """The description of this rank's file for rank 0, without tensor values."""

    tensors: list[TensorPart] = field(default_factory=list)
    local: FilePart | None = None
    """The values that this rank saves for itself; see ``Local``."""
    wrappers: dict[str, str] = field(default_factory=dict)
    loose: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    """The entries that JSON values refer to by number, by key."""
    param_groups: dict[int, Json] | None = None
    extra: Json = None
    own_states: dict[str, Json] = field(default_factory=dict)
    rng: Json = None
    per_rank: Json = None


class Draft:
    """The description of a rank's file, and its entries, while they are collected."""

    def __init__(self) -> None:
        self.part = FilePart()
        self.pieces: list[Piece] = []

    def put(self, tensor: Tensor, where: str) -> int:
        """Add a loose tensor, and return its number."""
        require_storable(tensor.dtype, where)
        loose = self.part.loose
        key = f"loose.{len(loose)}"
        shape = tuple(tensor.shape)
        loose[key] = tensor.dtype, shape
        self.pieces.append(Piece(tensor.dtype, shape, key, lambda: [tensor.detach()]))
        return len(loose) - 1

    def value(self, key: str, value: Any, name: str) -> Json:
        """Encode an optimizer state of a parameter that is not element-wise."""
        where = f"optimizer state {key!r} of {quoted(name)}"
        return encode(value, where, self.put, python_values=True)


RankPart = tuple[FilePart, File, dict[str, int]]
"""A rank's part, the rank's file, and the first payload byte of each entry, by key."""


def merge(told: Sequence[RankPart], block: int = BLOCK) -> Manifest:
    """Return the manifest of the parts of all ranks; ``told`` is in rank order."""
    merger = _Merger(told)
    parts = [part for part, _, _ in told]
    # Rank 0 alone has written ``extra`` and the options.
    first, groups = parts[0], parts[0].param_groups
    library = "unknown"
    with suppress(PackageNotFoundError):
        library = version("composable-fsdp")
    has_own = any(part.per_rank is not None for part in parts)
    own = [merger.shifted(p.per_rank, r) for r, p in enumerate(parts) if has_own]
    return Manifest(
        library=library,
        torch=str(torch.__version__),
        world_size=len(told),
        block_nbytes=block,
        files=tuple(file for _, file, _ in told),
        tensors=tuple(merger.tensors()),
        wrappers=first.wrappers,
        local=merger.local(),
        loose=tuple(merger.loose()),
        param_groups=None if groups is None else [*groups.values()],
        extra=first.extra,
        own_states=first.own_states,
        rng=tuple(merger.shifted(part.rng, r) for r, part in enumerate(parts)),
        # A rank without values has none to lose, and gets an empty dict back.
        per_rank=tuple({} if value is None else value for value in own),
    )


Written = Sequence[tuple[int, TensorPart]]


class _Merger:
    """Joins the parts of the ranks of a save."""

    def __init__(self, told: Sequence[RankPart]) -> None:
        self._told = told
        # Each rank numbers its loose tensors from 0, and the manifest has one list.
        counts = [len(part.loose) for part, _, _ in told]
        self._shifts = [0, *accumulate(counts[:-1])]

    def loose(self) -> Iterator[Stored]:
        """Yield the tensors that JSON values refer to, by number."""
        for rank, (part, _, begins) in enumerate(self._told):
            for key, (dtype, shape) in part.loose.items():
                yield Stored(dtype, shape, EntryPlace(rank, begins[key]))

    def shifted(self, value: Json, rank: int) -> Json:
        """Return a value of ``rank`` with the numbers of loose tensors of all ranks."""
        shift = self._shifts[rank]
        return _shifted(value, shift) if shift else value

    def local(self) -> tuple[Local, ...]:
        """Return the own values of each rank; empty if no rank has any."""
        found, empty = [], Local((), {}, None)
        for rank, (part, _, _) in enumerate(self._told):
            own = part.local or FilePart()
            tensors = tuple(self._tensor([(rank, each)]) for each in own.tensors)
            groups = own.param_groups and list(own.param_groups.values())
            values = own.own_states, groups
            found.append(Local(tensors, *(self.shifted(v, rank) for v in values)))
        return tuple(found) if any(each != empty for each in found) else ()

    def tensors(self) -> Iterator[SavedTensor]:
        """Yield the tensors that are saved once, in the order of the model."""
        found: dict[str, list[tuple[int, TensorPart]]] = {}
        # By the first name: a rank without elements of a tensor tells nothing of it.
        for rank, (part, _, _) in enumerate(self._told):
            for each in part.tensors:
                found.setdefault(each.names[0], []).append((rank, each))
        for written in sorted(found.values(), key=lambda each: each[0][1].number):
            # Ranks tell only of elements that they store, so only now all is known.
            _require_alike(written)
            yield self._tensor(written)

    def _tensor(self, written: Written) -> SavedTensor:
        """Return a tensor with the places of all parts; see ``tensors``."""
        by_offset: dict[tuple[int, ...], list[tuple[int, TensorPart]]] = {}
        for rank, part in written:
            by_offset.setdefault(part.offset, []).append((rank, part))
        cuts = tuple(tuple(sorted(set(each))) for each in zip(*by_offset, strict=True))
        ordered: list[tuple[int, TensorPart]] = []
        begins: list[tuple[int, ...]] = []
        first = written[0][1]
        facts, name = (first.names, first.dtype, first.shape), quoted(first.names[0])
        for box in SavedTensor(*facts, cuts, (), (), {}, {}).rectangles():
            at = by_offset.get(box.offset, [])
            parts = sorted(at, key=lambda each: each[1].span.start)
            where = f"the rectangle {box.shape} at {box.offset} of {name}"
            for _, part in parts:
                if (part.span.rectangle or box).shape != box.shape:
                    parts = []
            _require_cover(parts, box.numel, where if len(by_offset) > 1 else name)
            ordered += parts
            begins.append(tuple(part.span.start for _, part in parts))
        _require_same_state(ordered)
        rank, teller = ordered[0]

        def places(state: str | None = None) -> tuple[EntryPlace, ...]:
            return tuple(
                EntryPlace(r, self._told[r][2][part.key(state)]) for r, part in ordered
            )

        states = {k: SavedState(v, places(k)) for k, v in teller.states.items()}
        values = self.shifted(teller.values, rank)
        return SavedTensor(*facts, cuts, tuple(begins), places(), states, values)


def _shifted(value: Json, shift: int) -> Json:
    """Return ``value`` with ``shift`` added to the numbers of loose tensors."""
    if isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            return {"$tensor": value["$tensor"] + shift}
        return {key: _shifted(item, shift) for key, item in value.items()}
    if isinstance(value, list):
        return [_shifted(item, shift) for item in value]
    return value


def _require_alike(written: Written) -> None:
    """Raise CheckpointError if ranks have stored a tensor in different ways."""
    kinds = {
        (part.shape, part.dtype, part.span.rectangle is None): rank
        for rank, part in reversed(written)
    }
    # Meshes of different placements: no rank knows the values of all elements.
    if len(kinds) > 1:
        ranks = sorted(kinds.values())
        raise CheckpointError(
            f"{quoted(written[0][1].names[0])} is cut differently on ranks {ranks[0]} "
            f"and {ranks[1]} of the save; expected the same shape, dtype and "
            "placements on all ranks. Nothing was committed. Call parallelize_module "
            "alike on all ranks."
        )


def _require_cover(parts: Written, numel: int, what: str) -> None:
    """Raise CheckpointError, unless sorted parts cover ``numel`` elements once."""
    # A gap would come back as whatever the memory holds.
    end, before = 0, 0
    for rank, part in parts:
        if part.span.start < end:
            raise CheckpointError(
                f"Ranks {before} and {rank} of the save hold the same elements of "
                f"{what} without being replicas of each other. Pass fully_shard a 2-D "
                "device_mesh (replicate, shard), or save on the ranks of one copy."
            )
        if part.span.start > end:
            break
        end, before = part.span.stop, rank
    if end != numel or not parts:
        raise CheckpointError(
            f"Elements from {end} on of {what} were written by no rank. Call save on "
            "every rank that the model is sharded and cut over, with the same include, "
            "exclude and trainable_only, and before destroy_process_group."
        )


def _require_same_state(parts: Written) -> None:
    """Raise CheckpointError for optimizer state that differs between the parts."""
    rank, first = parts[0]
    name, kinds = first.names[0], {**first.states, **first.shared}
    # Of a state that a rank lacks, some elements would be missing.
    for other_rank, part in parts[1:]:
        others = {**part.states, **part.shared}
        for key in {**kinds, **others}:
            if kinds.get(key) == others.get(key):
                continue
            mine, theirs = (str(e.get(key, "absent"))[:80] for e in (kinds, others))
            raise CheckpointError(
                f"Optimizer state {key!r} of {quoted(name)} is {mine} on rank {rank} "
                f"of the save and {theirs} on rank {other_rank}, which hold parts of "
                "the parameter; a checkpoint has such state once. Nothing was "
                "committed. Step the same optimizer on every rank, and make its "
                "scalars equal (all-reduce them in the step)."
            )
