"""Where in a checkpoint a tensor's elements lie, and what lies in some bytes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from composable_fsdp.naming import quoted
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.storage.manifest import Manifest, Place, Region, Slot, Stored
from composable_fsdp.storage.validate import Entry, entries_by_file

_NAMED_IN_MESSAGES = 20


class Run(NamedTuple):
    """Elements ``[start, stop)`` of a tensor, and bytes ``[begin, end)`` of a file."""

    start: int
    stop: int
    file: int
    begin: int
    end: int


def whole_runs(stored: Stored, start: int, stop: int) -> list[Run]:
    """Where elements ``[start, stop)`` of a tensor lie that is not cut."""
    size, at = stored.dtype.itemsize, stored.at
    return [Run(start, stop, at.file, at.begin + start * size, at.begin + stop * size)]


def cut_runs(
    region: Region,
    slot: Slot,
    shards: tuple[Place, ...],
    itemsize: int,
    start: int,
    stop: int,
) -> list[Run]:
    """Where elements ``[start, stop)`` of a parameter lie, shard after shard."""
    size = region.shard_numel
    runs = []
    while start < stop:
        at = slot.offset + start
        shard, inner = divmod(at, size)
        count = min(stop - start, size - inner)
        place = shards[shard]
        begin = place.begin + inner * itemsize
        end = begin + count * itemsize
        runs.append(Run(start, start + count, place.file, begin, end))
        start += count
    return runs


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> str:
    """The interval as rectangles, as messages print it."""
    boxes = interval_boxes(shape, start, stop)
    return ", ".join(f"[offsets {b.offsets} sizes {b.sizes}]" for b in boxes)


class BytesDescription:
    """Names the parameters, with boxes, that lie in some bytes of a file's payload."""

    def __init__(self, manifest: Manifest, file: int) -> None:
        self.manifest, self.file = manifest, file

    def __call__(self, begin: int, end: int) -> str:
        found = []
        for entry in entries_by_file(self.manifest, "")[self.file]:
            low, high = max(begin, entry.begin), min(end, entry.end)
            if low < high:
                found += list(_inside(entry, low, high)) or [f"padding of {entry.what}"]
        more = f" and {len(found) - _NAMED_IN_MESSAGES} more"
        text = ", ".join(found[:_NAMED_IN_MESSAGES]) or "nothing"
        return text + (more if len(found) > _NAMED_IN_MESSAGES else "")


def _inside(entry: Entry, low: int, high: int) -> Iterator[str]:
    """What an entry holds in bytes ``[low, high)``."""
    region, state = entry.region, entry.state
    if region is None:
        size = entry.itemsize
        start, stop = (low - entry.begin) // size, -((entry.begin - high) // size)
        yield f"{entry.what} {boxes_of(entry.shape, start, stop)}"
        return
    base = entry.shard * region.shard_numel
    first = base + (low - entry.begin) // entry.itemsize
    last = base - (entry.begin - high) // entry.itemsize
    for i, slot in enumerate(region.slots):
        start = max(first - slot.offset, 0)
        stop = min(last - slot.offset, slot.numel)
        if start < stop and (state is None or i in state.slots):
            of = f"state {state.name!r} of " if state else ""
            yield f"{of}{quoted(slot.fqns[0])} {boxes_of(slot.shape, start, stop)}"
