"""Makes the layout of a unit: regions, of a cheap partition of block classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm, prod

import torch

from composable_fsdp.comm.wire_format import WireFormat
from composable_fsdp.planning.layout import (
    ParameterSlot,
    ParameterSpec,
    RegionLayout,
    row_strides,
)

LAUNCH_BYTES = 64 * 1024
"""Padding, in bytes of the whole buffer, that saving a kernel launch is worth."""

# At other addresses NCCL leaves its vectorized path (pytorch#195450).
SHARD_ALIGNMENT = 16
"""Alignment, in bytes, of every shard and of every full parameter."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Positions of the members of a buffer, and the size of the shards, in elements."""

    offsets: tuple[int, ...]
    shard_numel: int
    block: int
    """Least common multiple of the blocks and the alignment."""
    padding: int


# (numel, block) of each parameter, both in elements.
Members = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def pack(members: Members, itemsize: int, world_size: int, grid: int = 1) -> Packing:
    """Place the members in a buffer, without overlap and with few gaps."""
    # In elements; at least 1, for items wider than the alignment.
    align = max(SHARD_ALIGNMENT // itemsize, 1)
    # Wide blocks first: their starts have the coarsest grid, and narrow members fit
    # behind them with few gaps.
    order = sorted(range(len(members)), key=lambda i: (-members[i][1], i))
    offsets = [0] * len(members)
    end, grid = 0, lcm(align, grid)
    for i in order:
        numel, block = members[i]
        # At a multiple of the block, so that shard boundaries fall between blocks, and
        # of 16 bytes, because the full parameter is a view at this offset.
        offsets[i] = round_up(end, lcm(block, align))
        end = offsets[i] + numel
        # An empty parameter has no block that a boundary could cut.
        grid = lcm(grid, block) if numel else grid
    # The shard size is a multiple of every block, so each boundary is, too.
    shard_numel = round_up(-(-end // world_size), grid)
    padding = shard_numel * world_size - sum(numel for numel, _ in members)
    return Packing(tuple(offsets), shard_numel, grid, padding)


def pack_whole(
    sizes: tuple[int, ...], itemsize: int, world_size: int, grid: int = 1
) -> Packing:
    """Place each member inside the shard of a single rank."""
    align = max(SHARD_ALIGNMENT // itemsize, 1)
    # The rank as second entry: of equally full ranks the first, on every rank alike.
    ranks = [(0, rank) for rank in range(world_size)]
    placed = [(0, 0)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        end, rank = heappop(ranks)
        placed[i] = rank, end
        heappush(ranks, (round_up(end + sizes[i], align), rank))
    block = lcm(align, grid)
    shard_numel = round_up(max(end for end, _ in ranks), block)
    offsets = tuple(rank * shard_numel + end for rank, end in placed)
    padding = shard_numel * world_size - sum(sizes)
    return Packing(offsets, shard_numel, block, padding)


@lru_cache(maxsize=4096)
def partition(
    members: Members, itemsize: int, world_size: int, launch_bytes: int, grid: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return a partition of ``members`` into regions of which no two merge cheaper."""
    # Members with equal blocks always share a region. A unit has few classes: rows of
    # one or two widths, and single elements.
    classes: dict[int, list[int]] = {}
    for i, (_, block) in enumerate(members):
        classes.setdefault(block, []).append(i)

    def cost(indices: Sequence[int]) -> int:
        chosen = tuple(members[i] for i in sorted(indices))
        packing = pack(chosen, itemsize, world_size, grid)
        return packing.padding * itemsize + launch_bytes

    # Merge the pair of groups that saves most, until no merge saves anything. The best
    # of all set partitions pads 0.1 % of a unit less, in one of ten units.
    groups = list(classes.values())
    while len(groups) > 1:
        savings = [
            (cost(a) + cost(b) - cost(a + b), i, j)
            for i, a in enumerate(groups)
            for j, b in enumerate(groups[:i])
        ]
        saved, i, j = max(savings, key=lambda item: item[0])
        if saved <= 0:
            break
        groups[j] = groups[j] + groups.pop(i)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@lru_cache(maxsize=4096)
def plan_regions(
    specs: tuple[ParameterSpec, ...],
    world_size: int,
    launch_bytes: int = LAUNCH_BYTES,
) -> tuple[RegionLayout, ...]:
    """Lay out the parameters of a unit; equal arguments return the same layouts."""
    kinds: dict[tuple[torch.dtype, bool, WireFormat | None], list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault((spec.dtype, spec.trainable, spec.wire), []).append(index)
    regions: list[RegionLayout] = []
    for (dtype, trainable, wire), members in kinds.items():
        # Blocks of a wire format are intervals of the buffer that no boundary may cut.
        grid, item = wire.grid if wire else 1, dtype.itemsize
        alone, cut = _uncut(specs, members, world_size)
        # A shard group of one rank has no boundary that could cut a block.
        key = tuple(
            (specs[i].numel, specs[i].block if world_size > 1 else 1) for i in cut
        )
        packed = []
        # With several block classes (rows of 768, rows of 3072, single elements) shards
        # are multiples of the LCM, and padding grows quickly with many ranks; a region
        # per class costs an additional launch instead.
        for chosen in partition(key, item, world_size, launch_bytes, grid):
            packing = pack(tuple(key[i] for i in chosen), item, world_size, grid)
            packed.append(([(cut[i], *key[i]) for i in chosen], packing))
        if alone:
            sizes = tuple(specs[i].numel for i in alone)
            held = [(i, specs[i].numel, max(specs[i].numel, 1)) for i in alone]
            packed.append((held, pack_whole(sizes, item, world_size, grid)))
            # In the order of their first parameter.
            packed.sort(key=lambda each: min(i for i, _, _ in each[0]))
        for placed, packing in packed:
            slots = [
                ParameterSlot(
                    specs[i].fqns,
                    specs[i].shape,
                    numel,
                    block,
                    offset,
                    i,
                    specs[i].whole,
                )
                for (i, numel, block), offset in zip(
                    placed, packing.offsets, strict=True
                )
            ]
            # By numel as well: an empty parameter precedes the parameter at the same
            # offset.
            slots.sort(key=lambda slot: (slot.offset, slot.numel))
            layout = RegionLayout(
                dtype=dtype,
                trainable=trainable,
                block=packing.block,
                world_size=world_size,
                numel=sum(slot.numel for slot in slots),
                padded_numel=packing.shard_numel * world_size,
                shard_numel=packing.shard_numel,
                parameters=tuple(slots),
                wire=wire,
            )
            regions.append(layout)
    return tuple(regions)


def _uncut(
    specs: Sequence[ParameterSpec], members: Sequence[int], world_size: int
) -> tuple[list[int], list[int]]:
    """Return the members that lie on a single rank each, and the others."""
    if world_size == 1:  # holds everything, and nothing is cut
        return [], list(members)
    # A larger parameter would leave the other ranks with padding of its size.
    share = -(-sum(specs[i].numel for i in members) // world_size)
    alone = {i for i in members if specs[i].uncut and specs[i].numel <= share}
    return sorted(alone), [i for i in members if i not in alone]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor whose elements are adjacent in memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Position of the box's first element in the interval, in elements."""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return prod(self.sizes)

    @property
    def stop(self) -> int:
        """Position after the box's last element in the interval, in elements."""
        return self.start + self.numel


def moved(boxes: Sequence[Box], by: Sequence[int]) -> tuple[Box, ...]:
    """Return the boxes of a rectangle in the tensor in which it lies at ``by``."""
    return tuple(
        replace(box, offsets=tuple(a + b for a, b in zip(box.offsets, by, strict=True)))
        for box in boxes
    )


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut elements ``[start, stop)`` of a row-major tensor of ``shape`` into boxes.

    Raises: ValueError, if the interval is not inside the tensor.

    >>> [(box.offsets, box.sizes) for box in interval_boxes((4, 5), 3, 17)]
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(
            f"interval_boxes expects 0 <= start <= stop <= {prod(shape)} for shape "
            f"{shape}, got start={start}, stop={stop}."
        )
    strides = row_strides(shape)
    boxes: list[Box] = []
    position = start
    # Seen from its start, an interval first completes the rows in which it begins (with
    # growing strides), then takes whole slices of dim 0, then breaks off inside a row
    # (with shrinking strides). Each stride is used at most once upwards and once
    # downwards, so ``n`` dims give at most ``2 * n - 1`` boxes.
    while position < stop:
        sizes = _largest_box(shape, strides, position, stop)
        offsets = tuple(
            position // stride % size
            for size, stride in zip(shape, strides, strict=True)
        )
        boxes.append(Box(offsets, sizes, position - start))
        position += prod(sizes)
    return tuple(boxes)


def _largest_box(
    shape: tuple[int, ...], strides: tuple[int, ...], position: int, stop: int
) -> tuple[int, ...]:
    """Return the sizes of the largest box at ``position`` that ends by ``stop``."""
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        # A box along this dim must start where all later dims are at index 0; a box
        # that starts elsewhere would not be a single rectangle.
        if position % stride:
            continue
        left_in_dim = size - position // stride % size
        count = min((stop - position) // stride, left_in_dim)
        if count:
            return (1,) * dim + (count,) + shape[dim + 1 :]
    return ()  # a 0-d tensor has a single element, which is the box
