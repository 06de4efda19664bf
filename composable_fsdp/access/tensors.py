"""The tensors of a sharded model, as ``stream_full`` and ``boxes`` name and order them.

Names, shapes and places only: nothing is gathered, changed or sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.access.single import closest_names
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.naming import join_name, quoted, strip_wrapper
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.runtime.precision import own_buffers
from composable_fsdp.tree.state import _FSDPState

ALIGN = 16
"""Every tensor of a bucket begins at a multiple of so many bytes."""


class Entry(NamedTuple):
    """A tensor, under all of its names."""

    names: tuple[str, ...]
    ref: ParamRef | None
    source: Tensor
    """The sharded leaf; without ``ref``, a tensor that every rank holds."""
    dtype: torch.dtype
    joined: bool
    """Whether the parts on the ranks of tensor parallelism become one tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that is handed out."""
        if self.ref is None:
            source = self.source if self.joined else local_of(self.source)
            return tuple(source.shape)
        return self.ref.shape if self.joined else self.ref.slot.shape

    @property
    def is_cut(self) -> bool:
        """Return whether parts of other ranks have to be joined to it."""
        if self.ref is None:
            return self.joined and is_dtensor(self.source)
        whole = self.ref.slot.whole
        return self.joined and whole is not None and whole.is_cut

    @property
    def joined_nbytes(self) -> int:
        """Return the bytes of the tensor that the parts become; 0 if it is not cut."""
        return prod(self.shape) * self.dtype.itemsize if self.is_cut else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes in a bucket, equal on all ranks of tensor parallelism."""
        part = list(self.shape)
        if self.ref is not None and self.ref.slot.whole is not None:
            # Of parts that differ in size, the largest.
            part = list(self.ref.shape)
            for _, ranks, dim in self.ref.slot.whole.axes:
                if dim is not None:
                    part[dim] = -(-part[dim] // ranks)
        return aligned(prod(part) * self.dtype.itemsize) + self.joined_nbytes


def aligned(nbytes: int) -> int:
    """Return the next multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


def entries_of(
    units: Iterable[_FSDPState],
    model: nn.Module,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    *,
    joined: bool = True,
) -> list[list[Entry]]:
    """Return the tensors of each of ``units``, then those that no unit holds, alone.

    Raises: CompositionError, for ``names`` that ``model`` does not have.
    """
    refs: dict[tuple[int, str], ParamRef] = {}
    dtypes: dict[int, torch.dtype] = {}
    for state in units:
        handle = state.handle
        slots = {ref.slot.index: ref for ref in param_refs(handle)}
        for at, swap in zip(handle.layout.places, handle.swaps, strict=True):
            refs[id(swap[0]), swap[1]] = slots[at.slot_index]
        if state.precision is not None:
            # As in a state dict: the dtypes from before mixed precision cast them.
            before = state.precision.buffer_dtypes
            for number, name, buffer in own_buffers(state):
                dtypes[id(buffer)] = before.get((number, name), buffer.dtype)
    found: dict[tuple[int | None, int], Entry] = {}
    known: set[str] = set()
    wanted = None if names is None else set(map(strip_wrapper, names))
    for name, place, value in _named(model):
        known.add(name)
        if wanted is not None and name not in wanted:
            continue
        ref = refs.get(place)
        unit = None if ref is None else id(ref.handle)
        key = unit, id(value) if ref is None else ref.slot.index
        kept = dtypes.get(id(value), value.dtype)
        if key in found:
            found[key] = found[key]._replace(names=(*found[key].names, name))
            continue
        cast = kept if dtype is None or not kept.is_floating_point else dtype
        found[key] = Entry(
            (name,), ref, value if ref is None else ref.leaf, cast, joined
        )
    for name in (wanted or set()) - known:
        raise CompositionError(
            f"{type(model).__name__} has no parameter and no persistent buffer "
            f"{quoted(name)}. {closest_names(name, known)}"
        )
    by_unit: dict[object, list[Entry]] = {id(state.handle): [] for state in units}
    for key, entry in found.items():
        by_unit.setdefault(key if key[0] is None else key[0], []).append(entry)
    return [entries for entries in by_unit.values() if entries]


def _named(model: nn.Module) -> Iterator[tuple[str, tuple[int, str], Tensor]]:
    """Yield name, place and value: parameters at all places, then state buffers."""
    modules = [*walk.named(model, every_path=True)]
    for path, module in modules:
        for key, value in module._parameters.items():
            if value is not None:
                name = strip_wrapper(join_name(path, key))
                yield name, (id(module._parameters), key), value
    for path, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield strip_wrapper(join_name(path, key)), (0, ""), buffer
