"""Which rank holds which elements, as boxes; and who sends what to another layout.

Integers alone: every rank computes the same, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from composable_fsdp.access.single import closest_names
from composable_fsdp.access.tensors import Entry, beside, entries_of, entry_of
from composable_fsdp.access.unshard_params import _route, units_with_parts
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.naming import quoted
from composable_fsdp.planning.boxes import interval_boxes, moved
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.planner import lay_out_again
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

    The boxes of a name hold each of its elements once; with ``replicas`` once on each
    rank that has them. Names are those of ``stream_full``. A rank's boxes of a name lie
    in its sharded parameter one behind the other. Of experts that are no DTensors
    (``expert_mesh``), a rank knows its own alone.

    Raises: CompositionError, if the ranks of the meshes form no regular grid.

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

    Raises: TypeError, for no boxes; CompositionError, naming the tensor, if ``source``
        lacks elements, or holds them twice.

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
                f"transfer_plan: the source has no tensor {quoted(name)}. "
                f"{closest_names(name, source)}"
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


def _boxes_of(
    entry: Entry, states: Sequence[_FSDPState], *, replicas: bool
) -> Iterator[RankBox]:
    """Yield the boxes of a tensor, for each place in the grid of ranks."""
    state, ref, here = entry.state, entry.ref, dist.get_rank()
    grid = _grid(entry, states)
    used = [range(len(r) if is_cut or replicas else 1) for r, is_cut in grid]
    for at in product(*used):
        # The ranks of a grid have strides.
        rank = here + sum(r[i] - here for (r, _), i in zip(grid, at, strict=True))
        mesh = at[1 : 1 + len(entry.axes)]
        shape, offset = entry.rectangle(mesh)
        start, stop = 0, prod(shape)
        if state is not None and ref is not None:
            layout, slot = ref.region.layout, ref.slot
            if shape != slot.shape:
                there = {g: i for (g, _), i in zip(entry.axes, mesh, strict=True)}
                layout, slot = _laid_out(state, there)[slot.index]
            start, stop = layout.interval(slot, at[0])
        for box in moved(interval_boxes(shape, start, stop), offset):
            yield rank, box.offsets, box.sizes


def _grid(entry: Entry, states: Sequence[_FSDPState]) -> list[tuple[list[int], bool]]:
    """Return the ranks along each axis, and whether they hold other parts.

    The shard group comes first, then the mesh dims, then the axes of copies.
    """
    here, state = dist.get_rank(), entry.state
    shard = None if entry.ref is None else entry.ref.handle.groups.shard
    own = [(shard, True), *((group, dim is not None) for group, dim in entry.axes)]
    if state is not None:
        # Other ranks have copies, too; but of an expert those of its unit alone.
        is_alone = state.handle.groups.experts is not None
        states = [state, *([] if is_alone else states)]
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


def _laid_out(
    state: _FSDPState, there: Mapping[dist.ProcessGroup, int]
) -> dict[int, tuple[RegionLayout, ParameterSlot]]:
    """Return by index where parameters of a unit lie on ranks at ``there``.

    Raises: CompositionError, if the unit was laid out anew since ``fully_shard``.
    """
    handle = state.handle
    shapes: dict[int, tuple[int, ...]] = {}
    for ref in param_refs(handle):
        entry = entry_of(ref.name, ref, ref.leaf, ref.leaf.dtype)
        at = [there.get(group, group.rank()) for group, _ in entry.axes]
        shapes[ref.slot.index] = entry.rectangle(at)[0]
    plan, size = handle.layout.plan, handle.groups.shard_world_size
    same, other = (lay_out_again(plan, state.options, size, x) for x in (None, shapes))
    offsets, again = (
        {(s.index, s.offset, each.shard_numel) for each in x for s in each.parameters}
        for x in (plan.regions, same)
    )
    if offsets != again:
        raise CompositionError(
            f"boxes: parts of parameters of {state.title} differ in size over the "
            "ranks of tensor parallelism, and it was frozen, unfrozen or laid out by "
            "map_on_owners. Choose sizes that the ranks divide."
        )
    return {s.index: (each, s) for each in other for s in each.parameters}
