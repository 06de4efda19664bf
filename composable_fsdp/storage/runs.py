"""Places of elements of tensors in the files of a native checkpoint, in bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from composable_fsdp.naming import listed, quoted
from composable_fsdp.planning.boxes import interval_boxes, moved
from composable_fsdp.storage.manifest import (
    Cut,
    EntryPlace,
    Manifest,
    Region,
    Slot,
    Stored,
)
from composable_fsdp.storage.rectangles import Rectangle
from composable_fsdp.storage.validate import Entry, entries_by_file


class Run(NamedTuple):
    """Elements ``[start, stop)`` of a tensor, and bytes ``[begin, end)`` of a file.

    Of a parameter that is stored by rectangles, the elements of a rectangle.
    """

    start: int
    stop: int
    file: int
    begin: int
    end: int


def whole_runs(stored: Stored, start: int, stop: int) -> list[Run]:
    """Return the place of elements ``[start, stop)`` of a tensor in a single entry."""
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
    """Return the places of elements of a parameter, shard by shard."""
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


class PartRuns:
    """Finds the elements of a parameter that is stored in parts."""

    def __init__(self, cut: Cut) -> None:
        self._cut, self._rectangles = cut, cut.rectangles()
        # Per rectangle the index of the first part in ``cut.parts``.
        self._first = [0, *accumulate(map(len, cut.begins))]
        self._index = {
            (each.offset, each.shape): i for i, each in enumerate(self._rectangles)
        }

    def runs(
        self,
        places: tuple[EntryPlace, ...],
        itemsize: int,
        rectangle: Rectangle | None,
        start: int,
        stop: int,
    ) -> list[Run]:
        """Return the places of elements ``[start, stop)``, in order."""
        shape, whole = self._cut.shape, (0,) * len(self._cut.shape)
        wanted = rectangle or Rectangle(shape, whole, shape)
        # A rank that reads as a rank has saved: the elements are a few intervals.
        same = self._index.get((wanted.offset, wanted.shape))
        if same is not None:
            return self._in_rectangle(same, places, itemsize, start, stop)
        found: list[Run] = []
        for first, last in wanted.runs(start, stop):
            # A run of the whole tensor may go on in the next rectangle.
            while first < last:
                index, inner, left = self._at(first)
                end = inner + min(last - first, left)
                found += self._in_rectangle(index, places, itemsize, inner, end)
                first += end - inner
        return found

    def _at(self, position: int) -> tuple[int, int, int]:
        """Return where an element of the whole parameter is stored."""
        indices = []
        # From the last dim, whose indices are adjacent.
        for size in reversed(self._cut.shape):
            position, index = divmod(position, size)
            indices.append(index)
        found = inner = 0
        for index, begins, size in zip(
            reversed(indices), self._cut.cuts, self._cut.shape, strict=True
        ):
            i = bisect_right(begins, index) - 1
            # The last interval of a dim ends with the dim.
            end = begins[i + 1] if i + 1 < len(begins) else size
            found = found * len(begins) + i
            inner = inner * (end - begins[i]) + index - begins[i]
        width = self._rectangles[found].width
        return found, inner, width - inner % width

    def _in_rectangle(
        self,
        index: int,
        places: tuple[EntryPlace, ...],
        itemsize: int,
        start: int,
        stop: int,
    ) -> list[Run]:
        """Return the places of elements of a rectangle, part by part."""
        begins, first = self._cut.begins[index], self._first[index]
        runs = []
        # A search: a parameter of a large model has a part per rank.
        at = bisect_right(begins, start) - 1
        while start < stop:
            end = begins[at + 1] if at + 1 < len(begins) else stop
            count = min(stop, end) - start
            place = places[first + at]
            begin = place.begin + (start - begins[at]) * itemsize
            end = begin + count * itemsize
            runs.append(Run(start, start + count, place.file, begin, end))
            start, at = start + count, at + 1
        return runs


def boxes_of(
    shape: tuple[int, ...], start: int, stop: int, at: tuple[int, ...] | None = None
) -> str:
    """Return the interval of a flattened tensor as rectangles, as text for messages."""
    boxes = interval_boxes(shape, start, stop)
    if at is not None:
        boxes = moved(boxes, at)
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
