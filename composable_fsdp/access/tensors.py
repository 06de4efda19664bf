"""The tensors of a sharded model, as ``stream_full`` and ``boxes`` name and order them.

Names, shapes and places only: nothing is gathered, changed or sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.single import closest_names
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.naming import join_name, quoted, strip_wrapper
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.runtime.precision import own_buffers
from composable_fsdp.tree.state import _FSDPState


class Entry(NamedTuple):
    """A tensor, under all of its names."""

    names: tuple[str, ...]
    ref: ParamRef | None
    source: Tensor
    """The sharded leaf; without ``ref``, a tensor that every rank holds."""
    dtype: torch.dtype
    joined: bool
    """Whether parts of tensor parallelism are to be joined."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Return the shape of what the ranks of the shard group hold together."""
        return (
            tuple(local_of(self.source).shape)
            if self.ref is None
            else self.ref.slot.shape
        )

    @property
    def numel(self) -> int:
        """Return the elements that the ranks of the shard group hold together."""
        return prod(self.part_shape)

    @property
    def offset(self) -> int:
        """Return the first element in the region; 0 without a region."""
        return 0 if self.ref is None else self.ref.slot.offset

    @property
    def joined_over(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups whose parts are joined; none if the tensor is whole."""
        if not self.joined:
            return ()
        if self.ref is not None:
            return self.ref.form.cut_over
        source: Any = self.source
        return tuple(source.device_mesh.get_all_groups()) if is_dtensor(source) else ()

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape in the plain model."""
        return tuple(self.source.shape) if self.ref is None else self.ref.shape

    @property
    def joined_nbytes(self) -> int:
        """Return the bytes of what the parts are joined to; 0 if there are none."""
        return prod(self.whole_shape) * self.dtype.itemsize if self.joined_over else 0

    @property
    def part_nbytes(self) -> int:
        """Return the bytes of the largest part on a rank of tensor parallelism."""
        shape = list(self.part_shape if self.ref is None else self.whole_shape)
        if self.ref is not None and self.ref.slot.whole is not None:
            for _, ranks, dim in self.ref.slot.whole.axes:
                if dim is not None:
                    shape[dim] = -(-shape[dim] // ranks)
        return prod(shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes in a bucket, equal on all ranks of tensor parallelism."""
        return self.part_nbytes + self.joined_nbytes

    @property
    def joining_nbytes(self) -> int:
        """Return what torch needs to join the parts: a padded part, and all of them."""
        parts = prod(group.size() for group in self.joined_over)
        return (parts + 1) * self.part_nbytes if parts > 1 else 0

    def whole(self, part: Tensor) -> Tensor:
        """Return what is handed out. Collective: an all-gather per ``joined_over``."""
        if not self.joined_over:
            return part
        if self.ref is not None:
            return self.ref.form.whole(part)
        source: Any = self.source
        whole: Tensor = source.detach().to(self.dtype).full_tensor()
        return whole


def entries_of(
    units: Iterable[_FSDPState],
    model: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    joined: bool = True,
) -> list[list[Entry]]:
    """Return the tensors of each of ``units``, then those that no unit holds, alone."""
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
    for name, place, value in _named(model):
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
    by_unit: dict[object, list[Entry]] = {id(state.handle): [] for state in units}
    for key, entry in found.items():
        by_unit.setdefault(key if key[0] is None else key[0], []).append(entry)
    return [entries for entries in by_unit.values() if entries]


def chosen(
    units: list[list[Entry]], names: Iterable[str] | None, model: nn.Module
) -> list[list[Entry]]:
    """Return what has one of ``names``. Raises: CompositionError, for unknown names."""
    known = {name for unit in units for entry in unit for name in entry.names}
    wanted = known if names is None else set(map(strip_wrapper, names))
    for name in sorted(wanted - known):
        raise CompositionError(
            f"{type(model).__name__} has no parameter and no persistent buffer "
            f"{quoted(name)}. {closest_names(name, known)}"
        )
    picked = [
        [
            entry._replace(names=tuple(name for name in entry.names if name in wanted))
            for entry in unit
            if not wanted.isdisjoint(entry.names)
        ]
        for unit in units
    ]
    return [unit for unit in picked if unit]


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
