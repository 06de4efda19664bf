"""Places of elements of tensors in the files of a native checkpoint, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from composable_fsdp.naming import listed, quoted
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.storage.manifest import (
    Cut,
    EntryPlace,
    Manifest,
    Region,
    Slot,
    Stored,
)
from composable_fsdp.storage.validate import Entry, entries_by_file


class Run(NamedTuple):
    """Elements ``[start, stop)`` of a tensor, and bytes ``[begin, end)`` of a file."""

    start: int
    stop: int
    file: int
    begin: int
    end: int


def whole_runs(stored: Stored, start: int, stop: int) -> list[Run]:
    """Return the place of elements ``[start, stop)`` of a tensor in a single entry.

    Args:
        stored: the tensor.
        start: the first element.
        stop: the element after the last.

    Returns: a list of a single run.
    """
    size, at = stored.dtype.itemsize, stored.at
    return [Run(start, stop, at.file, at.begin + start * size, at.begin + stop * size)]


def cut_runs(
    region: Region,
    slot: Slot,
    shards: tuple[EntryPlace, ...],
    itemsize: int,
    start: int,
    stop: int,
) -> list[Run]:
    """Return the places of elements ``[start, stop)`` of a parameter, shard by shard.

    Args:
        region: the region of the parameter.
        slot: the parameter's slot in the region.
        shards: the places of the shards: of the region, or of an optimizer state.
        itemsize: the bytes of an element.
        start: the first element, counted in the flattened parameter.
        stop: the element after the last.

    Returns: a run for each shard that holds some of the elements, in order.
    """
    size = region.shard_numel
    runs = []
    # A parameter may span several shards. Each shard is an entry of its own, usually in
    # another file.
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


def part_runs(
    cut: Cut, places: tuple[EntryPlace, ...], itemsize: int, start: int, stop: int
) -> list[Run]:
    """Return the places of elements ``[start, stop)`` of a cut, part by part.

    Args:
        cut: the parameter.
        places: the places of the parts: of the cut, or of an optimizer state.
        itemsize: the bytes of an element.
        start: the first element, counted in the flattened parameter.
        stop: the element after the last.

    Returns: a run for each part that holds some of the elements, in order.
    """
    # A saved cut has a part per rank of its unit, so a search is not worth a table.
    runs = []
    for (first, last), place in zip(cut.bounds(), places, strict=True):
        low, high = max(start, first), min(stop, last)
        if low < high:
            begin = place.begin + (low - first) * itemsize
            end = begin + (high - low) * itemsize
            runs.append(Run(low, high, place.file, begin, end))
    return runs


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> str:
    """Return the interval of a flattened tensor as rectangles, as text for messages.

    Args:
        shape: the shape of the tensor.
        start: the first element.
        stop: the element after the last.
    """
    boxes = interval_boxes(shape, start, stop)
    return ", ".join(f"[offsets {b.offsets} sizes {b.sizes}]" for b in boxes)


class BytesDescription:
    """A function that names the tensors in some bytes of a file, with boxes."""

    def __init__(self, manifest: Manifest, file: int) -> None:
        self.manifest, self.file = manifest, file

    def __call__(self, begin: int, end: int) -> str:
        found = []
        # Computed on each call and not stored: only error messages need the entries.
        for entry in entries_by_file(self.manifest, "")[self.file]:
            low, high = max(begin, entry.begin), min(end, entry.end)
            if low < high:
                found += list(_inside(entry, low, high)) or [f"padding of {entry.what}"]
        return listed(found) or "nothing"


def _inside(entry: Entry, low: int, high: int) -> Iterator[str]:
    """Yield the tensors of an entry that have elements in bytes ``[low, high)``."""
    region, state = entry.region, entry.state
    if region is None:
        size = entry.itemsize
        # Round outwards: an element counts if any byte is in the interval.
        start, stop = (low - entry.begin) // size, -((entry.begin - high) // size)
        yield f"{entry.what} {boxes_of(entry.shape, start, stop)}"
        return
    # Positions in the flat buffer, rounded outwards to whole elements.
    base = entry.shard * region.shard_numel
    first = base + (low - entry.begin) // entry.itemsize
    last = base - (entry.begin - high) // entry.itemsize
    for i, slot in enumerate(region.slots):
        start = max(first - slot.offset, 0)
        stop = min(last - slot.offset, slot.numel)
        # Parameters without the state have zeros in the entry, which are not named.
        if start < stop and (state is None or i in state.slots):
            of = f"state {state.name!r} of " if state else ""
            yield f"{of}{quoted(slot.fqns[0])} {boxes_of(slot.shape, start, stop)}"
