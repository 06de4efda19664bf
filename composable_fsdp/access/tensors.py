"""The tensors of a sharded model, and where they stand, for ``stream_full`` and boxes.

Names, shapes and places only: nothing is gathered, changed or sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
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
from composable_fsdp.planning.dtensors import local_of, whole_of
from composable_fsdp.runtime.precision import own_buffers
from composable_fsdp.tree.state import OWNERS, _FSDPState


class Entry(NamedTuple):
    """A tensor, under all of its names, and how ranks divide it."""

    names: tuple[str, ...]
    state: _FSDPState | None
    """The unit that shards it, or of whose experts it is a buffer."""
    ref: ParamRef | None
    source: Tensor
    """The sharded leaf; without ``ref``, a tensor that every rank holds."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape in the plain model."""
    part: tuple[int, ...]
    """The shape of what the ranks of the shard group hold together."""
    axes: tuple[tuple[dist.ProcessGroup, int | None], ...]
    """The groups of a DTensor's mesh, and the dim that each cuts."""
    over: tuple[dist.ProcessGroup, ...]
    """The groups whose parts are joined, if any."""

    @property
    def is_expert(self) -> bool:
        """Return whether other ranks have other tensors in its place."""
        return (
            self.state is not None and self.state.handle.groups.experts_ref is not None
        )

    @property
    def offset(self) -> int:
        """Return the first element in the region; 0 without a region."""
        return 0 if self.ref is None else self.ref.slot.offset

    def rectangle(self, at: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and offset of the part at coordinate ``at`` of ``axes``."""
        sizes, offset = [*self.shape], [0] * len(self.shape)
        for (group, dim), i in zip(self.axes, at, strict=True):
            if dim is not None:
                # As torch cuts: the last ranks may have fewer rows, or none.
                chunk = -(-self.shape[dim] // group.size())
                offset[dim] = min(i * chunk, self.shape[dim])
                sizes[dim] = min(chunk, self.shape[dim] - offset[dim])
        return tuple(sizes), tuple(offset)

    @property
    def part_nbytes(self) -> int:
        """Return the bytes of the largest part on a rank of tensor parallelism."""
        return prod(self.rectangle([0] * len(self.axes))[0]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes in a bucket, with those of the whole that parts make."""
        joined = prod(self.shape) * self.dtype.itemsize if self.over else 0
        return self.part_nbytes + joined

    def whole(self, part: Tensor) -> Tensor:
        """Return what is handed out. Collective: an all-gather per group of parts."""
        if not self.over:
            return part
        if self.ref is not None:
            return self.ref.form.whole(part)
        source: Any = self.source
        whole: Tensor = source.detach().to(self.dtype).full_tensor()
        return whole


def beside(ranks: set[int], group: dist.ProcessGroup) -> set[int]:
    """Return the ranks that stand to ``ranks`` as those of ``group`` to this rank."""
    # Ranks of a mesh have strides.
    steps = [each - dist.get_rank() for each in dist.get_process_group_ranks(group)]
    return {rank + step for rank in ranks for step in steps}


def entries_of(
    states: Sequence[_FSDPState],
    model: nn.Module,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    *,
    joined: bool = True,
) -> list[list[Entry]]:
    """Return the tensors of each unit, then those that no unit holds, one by one.

    Raises: CompositionError, for ``names`` that ``model`` does not have.
    """
    every = {entry.names[0]: entry for entry in _entries(states, model, dtype, joined)}
    wanted = every if names is None else dict.fromkeys(map(strip_wrapper, names))
    for name in wanted:
        if name not in every:
            raise CompositionError(
                f"{type(model).__name__} has no parameter and no persistent buffer "
                f"{quoted(name)}. {closest_names(name, every)}"
            )
    units: dict[int, dict[int, Entry]] = {id(state): {} for state in states}
    for name, entry in every.items():
        if name in wanted:
            unit = units.setdefault(id(entry.state or entry.source), {})
            same = unit.get(id(entry.source))
            names = (name,) if same is None else (*same.names, name)
            unit[id(entry.source)] = entry._replace(names=names)
    return [[*entries.values()] for entries in units.values() if entries]


def _entries(
    states: Iterable[_FSDPState],
    model: nn.Module,
    dtype: torch.dtype | None,
    joined: bool,
) -> Iterator[Entry]:
    """Yield an entry per name: all parameters, then the persistent buffers."""
    held: dict[tuple[int, str], tuple[_FSDPState, ParamRef]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for state in states:
        handle = state.handle
        refs = {ref.slot.index: ref for ref in param_refs(handle)}
        for at, swap in zip(handle.layout.places, handle.swaps, strict=True):
            held[id(swap[0]), swap[1]] = state, refs[at.slot_index]
        if state.precision is not None:
            # As in a state dict: the dtypes from before mixed precision cast them.
            before = state.precision.buffer_dtypes
            for number, name, buffer in own_buffers(state):
                dtypes[id(buffer)] = before.get((number, name), buffer.dtype)
    modules = [*walk.named(model, every_path=True)]
    for kind, (path, module) in product(("_parameters", "_buffers"), modules):
        table: dict[str, Tensor | None] = getattr(module, kind)
        owner = OWNERS.get(module)
        is_expert = owner is not None and owner.handle.groups.experts is not None
        outside = owner if is_expert else None, None
        for key, value in table.items():
            if value is None or key in module._non_persistent_buffers_set:
                continue
            unit, ref = held.get((id(table), key), outside)
            source = value if ref is None else ref.leaf
            own = dtypes.get(id(source), source.dtype)
            cast = dtype if dtype and own.is_floating_point else own
            name = strip_wrapper(join_name(path, key))
            yield entry_of(name, ref, source, cast, unit, joined=joined)


def entry_of(
    name: str,
    ref: ParamRef | None,
    source: Tensor,
    dtype: torch.dtype,
    state: _FSDPState | None = None,
    *,
    joined: bool = False,
) -> Entry:
    """Return the tensor that has ``name``."""
    if ref is not None:
        shape, part = ref.shape, ref.slot.shape
        whole, groups = ref.slot.whole, ref.form.mesh_groups
    else:
        shape, part = tuple(source.shape), tuple(local_of(source).shape)
        mesh: Any = getattr(source, "device_mesh", None)
        whole, groups = whole_of(source), mesh.get_all_groups() if mesh else ()
    dims = [dim for *_, dim in whole.axes] if whole else []
    axes = tuple(zip(groups, dims, strict=True))
    # A DTensor outside of units may be a sum that is still to be made.
    over = [each for each, dim in axes if dim is not None or ref is None] * joined
    return Entry((name,), state, ref, source, dtype, shape, part, axes, tuple(over))
