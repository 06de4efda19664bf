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

from composable_fsdp.access.tensors import Entry, beside, entries_of
from composable_fsdp.access.unshard_params import _route, units_with_parts
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import did_you_mean, listed, quoted
from composable_fsdp.planning.partition import interval_boxes, moved
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
    in its sharded parameter one behind the other.

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
