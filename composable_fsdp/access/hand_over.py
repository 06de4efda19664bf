"""The tensors of a sharded model: where they stand, and who sends what elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.settings import units_with_parts
from composable_fsdp.access.unshard_params import _route
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
from composable_fsdp.planning.partition import interval_boxes, moved
from composable_fsdp.runtime.recover import own_buffers
from composable_fsdp.tree.state import _FSDPState

RankBox = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A global rank, and offsets and sizes of a box that it holds."""
Boxes = Mapping[str, Sequence[RankBox]]


class Transfer(NamedTuple):
    """A box of a tensor that rank ``source`` sends to rank ``target``."""

    source: int
    target: int
    name: str
    box: tuple[tuple[int, ...], tuple[int, ...]]
    """Offsets and sizes in the whole tensor."""


def boxes(
    model: nn.Module, *, replicas: bool = False
) -> dict[str, tuple[RankBox, ...]]:
    """Return which global rank holds which box of each tensor, on all ranks alike.

    The boxes of a name (as in ``stream_full``) hold each element once; with
    ``replicas`` once on each rank that has it. They lie in a rank's sharded parameter
    one behind the other.

    Raises: CompositionError, if the ranks of the meshes form no regular grid, or if
        parts of tensor parallelism differ in size.

    >>> boxes(model)["head.weight"]
    ((0, (0, 0), (4, 4)),)
    """
    states = units_with_parts(model, "boxes")
    found: dict[str, tuple[RankBox, ...]] = {}
    for entry in [entry for unit in entries_of(states, model) for entry in unit]:
        parts = tuple(sorted(_boxes_of(entry, states, replicas=replicas)))
        found |= dict.fromkeys(entry.names, parts)
    return found


def transfer_plan(source: Boxes, target: Boxes) -> list[Transfer]:
    """Return what ranks of ``source`` send, so that ``target`` has its boxes.

    Each element is sent once to each rank of ``target`` that asks for it. Ranks are
    those of either side, which may be other processes.

    Raises: CompositionError, naming the tensor, if ``source`` lacks elements, or holds
        them twice.

    >>> engine = {"head.weight": ((0, (0, 0), (2, 4)), (1, (2, 0), (2, 4)))}
    >>> transfer_plan(boxes(model), engine)[1]
    Transfer(source=0, target=1, name='head.weight', box=((2, 0), (2, 4)))
    """
    for each in (source, target):
        if not isinstance(each, Mapping):
            raise TypeError(
                "transfer_plan expects boxes by the name of the tensor, got a "
                f"{type(each).__name__}. Pass boxes(model)."
            )
    plan: list[Transfer] = []
    for name, wanted in target.items():
        if name not in source:
            raise CompositionError(
                f"transfer_plan: the source has no tensor {quoted(name)}"
                f"{did_you_mean(name, source, most=3)}. It has {listed(source)}."
            )
        for rank, offsets, sizes in wanted:
            left = prod(sizes)
            for holder, begins, counts in source[name]:
                if not len(offsets) == len(sizes) == len(begins):
                    continue
                low = tuple(map(max, offsets, begins))
                ends = zip(offsets, sizes, begins, counts, low, strict=True)
                shape = tuple([min(o + s, b + c) - i for o, s, b, c, i in ends])
                if min(shape, default=1) > 0:
                    plan.append(Transfer(holder, rank, name, (low, shape)))
                    left -= prod(shape)
            if left:
                raise CompositionError(
                    f"transfer_plan: of box {offsets}, {sizes} of {quoted(name)} the "
                    f"source {'lacks' if left > 0 else 'holds twice'} {abs(left)} "
                    f"elements; it holds {source[name][:1]} and so on. Pass "
                    "boxes(model) of the whole model, without replicas."
                )
    return plan


class Entry(NamedTuple):
    """A tensor, under all of its names, and how ranks divide it."""

    names: tuple[str, ...]
    ref: ParamRef | None
    source: Tensor
    """The sharded leaf; without ``ref``, a tensor that every rank holds."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape in the plain model."""
    part: tuple[int, ...]
    """The shape of what the ranks of the shard group hold together."""
    offset: int
    axes: list[tuple[dist.ProcessGroup, int | None]]
    """The groups of a DTensor's mesh, and the dim that each cuts."""
    over: list[dist.ProcessGroup]
    """The groups whose parts are joined, if any."""

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
    """Return the tensors of each unit, then those that no unit holds, one by one."""
    every = {each[0]: each for each in _entries(states, model, dtype)}
    wanted = dict.fromkeys(every if names is None else map(strip_wrapper, names))
    for name in wanted:
        if name not in every:
            raise CompositionError(
                f"{type(model).__name__} has no parameter and no persistent buffer "
                f"{quoted(name)}{did_you_mean(name, every, most=3)}. It has "
                f"{listed(every)}."
            )
    units: dict[int, dict[int, list[str]]] = {id(state.handle): {} for state in states}
    for name, (_, ref, source, _) in every.items():
        if name in wanted:
            unit = units.setdefault(id(source if ref is None else ref.handle), {})
            unit.setdefault(id(source), []).append(name)
    return [
        [_entry(tuple(same), *every[same[0]][1:], joins) for same in unit.values()]
        for unit in units.values()
        if unit
    ]


def _entry(
    names: tuple[str, ...],
    ref: ParamRef | None,
    source: Tensor,
    dtype: torch.dtype,
    joins: bool,
) -> Entry:
    """Return a tensor with its facts; ``joins`` joins parts of tensor parallelism."""
    if ref is not None:
        shape, part, offset = ref.shape, ref.slot.shape, ref.slot.offset
        whole, groups = ref.slot.whole, ref.form.mesh_groups
    else:
        shape, part, offset = tuple(source.shape), tuple(local_of(source).shape), 0
        mesh: Any = getattr(source, "device_mesh", None)
        whole, groups = whole_of(source), mesh.get_all_groups() if mesh else ()
    axes = [*zip(groups, [dim for *_, dim in whole.axes] if whole else [], strict=True)]
    # A DTensor outside of units may be a sum that is still to be made.
    over = [group for group, dim in axes if dim is not None or ref is None] * joins
    return Entry(names, ref, source, dtype, shape, part, offset, axes, over)


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


def _boxes_of(
    entry: Entry, states: Sequence[_FSDPState], *, replicas: bool
) -> Iterator[RankBox]:
    """Yield the boxes of a tensor, for each place in the grid of ranks."""
    ref, here = entry.ref, dist.get_rank()
    grid = _grid(entry, states)
    used = [range(len(r) if is_cut or replicas else 1) for r, is_cut in grid]
    for at in product(*used):
        # The ranks of a grid have strides.
        rank = here + sum(r[i] - here for (r, _), i in zip(grid, at, strict=True))
        shape, offset = entry.rectangle(at[1 : 1 + len(entry.axes)])
        start, stop = 0, prod(shape)
        if ref is not None:
            # Such ranks lay out their regions otherwise.
            if shape != ref.slot.shape:
                raise CompositionError(
                    f"boxes: parts of {quoted(entry.names[0])} differ in size over the "
                    f"ranks of tensor parallelism ({ref.slot.shape} here, {shape} on "
                    f"rank {rank}). Choose sizes that the ranks divide, or send whole "
                    "tensors by stream_full."
                )
            start, stop = ref.region.layout.interval(ref.slot, at[0])
        for box in moved(interval_boxes(shape, start, stop), offset):
            yield rank, box.offsets, box.sizes


def _grid(entry: Entry, states: Sequence[_FSDPState]) -> list[tuple[list[int], bool]]:
    """Return ranks and whether parts differ, of shard group, mesh dims, copies."""
    here = dist.get_rank()
    shard = None if entry.ref is None else entry.ref.handle.groups.shard
    own = [(shard, True), *((group, dim is not None) for group, dim in entry.axes)]
    copies = [(group, False) for each in states for group in _route(each)]
    grid: list[tuple[list[int], bool]] = []
    span = {here}
    for group, is_cut in [*own, *copies]:
        ranks = [here] if group is None else dist.get_process_group_ranks(group)
        if len(grid) < len(own) or span.intersection(ranks) == {here}:
            grid.append((ranks, is_cut))
            span = span if group is None else beside(span, group)
    if not span <= set(range(dist.get_world_size())):
        raise CompositionError(
            f"boxes: the ranks {[ranks for ranks, _ in grid]} that hold "
            f"{quoted(entry.names[0])} form no regular grid. Make one mesh by "
            "init_device_mesh."
        )
    return grid
