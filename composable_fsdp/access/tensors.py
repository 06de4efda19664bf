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
from composable_fsdp.tree.state import OWNERS, _FSDPState


class Entry(NamedTuple):
    """A tensor, under all of its names."""

    names: tuple[str, ...]
    ref: ParamRef | None
    source: Tensor
    """The sharded leaf; without ``ref``, a tensor that every rank holds."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape in the plain model."""
    part: tuple[int, ...]
    """The shape of what the ranks of the shard group hold together."""
    over: tuple[dist.ProcessGroup, ...]
    """The groups whose parts are joined, if any."""

    @property
    def offset(self) -> int:
        """Return the first element in the region; 0 without a region."""
        return 0 if self.ref is None else self.ref.slot.offset

    @property
    def part_nbytes(self) -> int:
        """Return the bytes of the largest part on a rank of tensor parallelism."""
        shape = [*self.part]
        whole = None if self.ref is None else self.ref.slot.whole
        for _, ranks, dim in () if whole is None else whole.axes:
            if dim is not None:
                shape[dim] = -(-self.shape[dim] // ranks)
        return prod(shape) * self.dtype.itemsize

    @property
    def joined_nbytes(self) -> int:
        """Return the bytes of what the parts are joined to; 0 if there are none."""
        return prod(self.shape) * self.dtype.itemsize if self.over else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes in a bucket, equal on all ranks of tensor parallelism."""
        return self.part_nbytes + self.joined_nbytes

    def whole(self, part: Tensor) -> Tensor:
        """Return what is handed out. Collective: an all-gather per group of parts."""
        if not self.over:
            return part
        if self.ref is not None:
            return self.ref.form.whole(part)
        source: Any = self.source
        whole: Tensor = source.detach().to(self.dtype).full_tensor()
        return whole


def _entry(
    name: str, ref: ParamRef | None, value: Tensor, dtype: torch.dtype, *, joined: bool
) -> Entry:
    """Return the tensor that has ``name``."""
    over: tuple[dist.ProcessGroup, ...] = ()
    if ref is not None:
        over = ref.form.cut_over if joined else ()
        return Entry((name,), ref, ref.leaf, dtype, ref.shape, ref.slot.shape, over)
    if joined and is_dtensor(value):
        source: Any = value
        over = tuple(source.device_mesh.get_all_groups())
    part = tuple(local_of(value).shape)
    return Entry((name,), None, value, dtype, tuple(value.shape), part, over)


def entries_of(
    states: Iterable[_FSDPState],
    model: nn.Module,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    *,
    joined: bool = True,
) -> list[list[Entry]]:
    """Return the tensors of each unit, then those that no unit holds, one by one.

    Raises: CompositionError, for ``names`` that ``model`` does not have.
    """
    refs: dict[tuple[int, str], ParamRef] = {}
    dtypes: dict[int, torch.dtype] = {}
    for state in states:
        handle = state.handle
        slots = {ref.slot.index: ref for ref in param_refs(handle)}
        for at, swap in zip(handle.layout.places, handle.swaps, strict=True):
            refs[id(swap[0]), swap[1]] = slots[at.slot_index]
        if state.precision is not None:
            # As in a state dict: the dtypes from before mixed precision cast them.
            before = state.precision.buffer_dtypes
            for number, name, buffer in own_buffers(state):
                dtypes[id(buffer)] = before.get((number, name), buffer.dtype)
    named = [*_named(model)]
    known = {name for name, *_ in named}
    wanted = known if names is None else set(map(strip_wrapper, names))
    for name in sorted(wanted - known):
        raise CompositionError(
            f"{type(model).__name__} has no parameter and no persistent buffer "
            f"{quoted(name)}. {closest_names(name, known)}"
        )
    units: dict[int, dict[int, Entry]] = {id(state.handle): {} for state in states}
    for name, (module, key), value in named:
        if name not in wanted:
            continue
        ref, owner = refs.get((id(module._parameters), key)), OWNERS.get(module)
        unit = place = id(value)
        if ref is not None:
            unit, place = id(ref.handle), ref.slot.index
        elif owner is not None and owner.handle.groups.experts is not None:
            unit = id(owner.handle)  # which other ranks do not have
        entries = units.setdefault(unit, {})
        if place in entries:
            same = entries[place]
            entries[place] = same._replace(names=(*same.names, name))
            continue
        own = dtypes.get(id(value), value.dtype)
        cast = own if dtype is None or not own.is_floating_point else dtype
        entries[place] = _entry(name, ref, value, cast, joined=joined)
    return [[*entries.values()] for entries in units.values() if entries]


def _named(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str], Tensor]]:
    """Yield name, place and value: all parameters, then the persistent buffers."""
    modules = [*walk.named(model, every_path=True)]
    for kind in ("_parameters", "_buffers"):
        for path, module in modules:
            table: dict[str, Tensor | None] = getattr(module, kind)
            for key, value in table.items():
                if value is not None and key not in module._non_persistent_buffers_set:
                    yield strip_wrapper(join_name(path, key)), (module, key), value
