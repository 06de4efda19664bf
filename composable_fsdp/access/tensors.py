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

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.naming import (
    did_you_mean,
    join_name,
    listed,
    quoted,
    strip_wrapper,
)
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import local_of, whole_of
from composable_fsdp.runtime.recover import own_buffers
from composable_fsdp.tree.state import _FSDPState


class Entry(NamedTuple):
    """A tensor, under all of its names, and how ranks divide it."""

    names: tuple[str, ...]
    ref: ParamRef | None
    source: Tensor
    """The sharded leaf; without ``ref``, a tensor that every rank holds."""
    dtype: torch.dtype
    joins: bool
    """Whether the parts of tensor parallelism are joined."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the plain model."""
        return tuple(self.source.shape) if self.ref is None else self.ref.shape

    @property
    def part(self) -> tuple[int, ...]:
        """Return the shape of what the ranks of the shard group hold together."""
        if self.ref is None:
            return tuple(local_of(self.source).shape)
        return self.ref.slot.shape

    @property
    def axes(self) -> list[tuple[dist.ProcessGroup, int | None]]:
        """Return the groups of a DTensor's mesh, and the dim that each cuts."""
        if self.ref is not None:
            whole, groups = self.ref.slot.whole, self.ref.form.mesh_groups
        else:
            mesh: Any = getattr(self.source, "device_mesh", None)
            whole, groups = whole_of(self.source), mesh.get_all_groups() if mesh else ()
        dims = [dim for *_, dim in whole.axes] if whole else []
        return [*zip(groups, dims, strict=True)]

    @property
    def over(self) -> list[dist.ProcessGroup]:
        """Return the groups whose parts are joined, if any."""
        # A DTensor outside of units may be a sum that is still to be made.
        cut = [each for each, dim in self.axes if dim is not None or self.ref is None]
        return cut * self.joins

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
    joins: bool = False,
) -> list[list[Entry]]:
    """Return the tensors of each unit, then those that no unit holds, one by one.

    Raises: CompositionError, for ``names`` that ``model`` does not have.
    """
    every = {each[0]: each for each in _entries(states, model, dtype)}
    wanted = dict.fromkeys(every if names is None else map(strip_wrapper, names))
    for name in wanted:
        if name not in every:
            raise CompositionError(
                f"{type(model).__name__} has no parameter and no persistent buffer "
                f"{quoted(name)}{did_you_mean(name, every, most=3)}. It has "
                f"{listed(every)}."
            )
    units: dict[int, dict[int, Entry]] = {id(state.handle): {} for state in states}
    for name, (_, ref, source, own) in every.items():
        if name in wanted:
            unit = units.setdefault(id(source if ref is None else ref.handle), {})
            same = unit.get(id(source))
            of = (name,) if same is None else (*same.names, name)
            unit[id(source)] = Entry(of, ref, source, own, joins)
    return [[*entries.values()] for entries in units.values() if entries]


def _entries(
    states: Iterable[_FSDPState], model: nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[str, ParamRef | None, Tensor, torch.dtype]]:
    """Yield name and facts of each tensor: all parameters, then persistent buffers."""
    held: dict[tuple[int, str], ParamRef] = {}
    dtypes: dict[int, torch.dtype] = {}
    for state in states:
        handle = state.handle
        refs = {ref.slot.index: ref for ref in param_refs(handle)}
        for at, swap in zip(handle.layout.places, handle.swaps, strict=True):
            held[id(swap[0]), swap[1]] = refs[at.slot_index]
        if state.precision is not None:
            # As in a state dict: the dtypes from before mixed precision cast them.
            before = state.precision.buffer_dtypes
            for number, name, buffer in own_buffers(state):
                dtypes[id(buffer)] = before.get((number, name), buffer.dtype)
    modules = [*walk.named(model, every_path=True)]
    for kind, (path, module) in product(("_parameters", "_buffers"), modules):
        table: dict[str, Tensor | None] = getattr(module, kind)
        for key, value in table.items():
            if value is None or key in module._non_persistent_buffers_set:
                continue
            ref = held.get((id(table), key))
            source = value if ref is None else ref.leaf
            own = dtypes.get(id(source), source.dtype)
            cast = dtype if dtype and own.is_floating_point else own
            yield strip_wrapper(join_name(path, key)), ref, source, cast
