"""Maps a tensor's elements to bytes of a checkpoint's files, and bytes to tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from composable_fsdp.naming import quoted
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.storage.manifest import Manifest, Place, Region, Slot, Stored
from composable_fsdp.storage.validate import Entry, entries_by_file

_NAMED_IN_MESSAGES = 20
"""The number of tensors that a message lists at most."""


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
    shards: tuple[Place, ...],
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
        more = f" and {len(found) - _NAMED_IN_MESSAGES} more"
        text = ", ".join(found[:_NAMED_IN_MESSAGES]) or "nothing"
        return text + (more if len(found) > _NAMED_IN_MESSAGES else "")


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
