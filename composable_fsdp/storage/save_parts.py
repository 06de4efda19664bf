"""Which replica writes which bytes of a save: the same answer on all, unsaid."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from composable_fsdp.planning.layout import RegionLayout

SMALLEST_PART = 1 << 18
"""The bytes of a part, an entry and a request of its own, below which none is made."""


def writers_of(regions: Iterable[tuple[RegionLayout, int]]) -> list[int | None]:
    """Return the replica that writes each region's shards, or None: each a part."""
    whole: list[tuple[Hashable, int, int]] = []
    divided: list[bool] = []
    for layout, replicas in regions:
        nbytes = layout.shard_numel * layout.dtype.itemsize
        # All parts have a single size: only behind the last shard is room for padding.
        fits = layout.world_size == 1 or layout.shard_numel % replicas == 0
        is_large = nbytes >= replicas * SMALLEST_PART
        divided.append(replicas > 1 and is_large and fits)
        if not divided[-1]:
            # Most optimizers keep two states of a parameter that is trained.
            weight = nbytes * (3 if layout.trainable else 1)
            whole.append(((layout.world_size, replicas), replicas, weight))
    turns = iter(by_turns(whole))
    return [None if parted else next(turns) for parted in divided]


def by_turns(items: Sequence[tuple[Hashable, int, int]]) -> list[int]:
    """Return a writer per item, such that the writers write about as many bytes."""
    # Not by largest first: a model that grows by a unit keeps the other writers.
    loads: dict[Hashable, list[int]] = {}
    found = []
    for key, writers, nbytes in items:
        mine = loads.setdefault(key, [0] * writers)
        # The first of equals, so that what has no bytes stays with the first writer.
        writer = 0 if not nbytes else min(range(writers), key=mine.__getitem__)
        mine[writer] += nbytes
        found.append(writer)
    return found


def save_bytes(
    regions: Sequence[tuple[RegionLayout, int]],
    optimizer_states: int,
    bytes_per_element: float = 0,
) -> int:
    """Return the bytes of the elements that a rank writes, at most."""
    loads: dict[tuple[int, int], list[int]] = {}
    for (layout, replicas), writer in zip(regions, writers_of(regions), strict=True):
        mine = loads.setdefault((layout.world_size, replicas), [0] * replicas)
        numel = layout.shard_numel
        # Padding counts: the last part of a shard is as long as the others.
        if writer is None:
            numel = -(-numel // replicas)
        nbytes = numel * layout.dtype.itemsize
        if layout.trainable:
            nbytes += optimizer_states * nbytes + round(bytes_per_element * numel)
        for each in range(replicas) if writer is None else (writer,):
            mine[each] += nbytes
    # A rank may be the busiest in each of its groups.
    return sum(max(each) for each in loads.values())
