"""Places of elements of tensors in the files of a native checkpoint, in bytes."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from composable_fsdp.naming import listed
from composable_fsdp.planning.boxes import interval_boxes, moved
from composable_fsdp.storage.manifest import (
    Manifest,
    Places,
    Rectangle,
    SavedTensor,
    Span,
)
from composable_fsdp.storage.validate import entries_by_file


class Run(NamedTuple):
    """Bytes ``[begin, end)`` of the payload of a file."""

    file: int
    begin: int
    end: int


class PartRuns:
    """Finds the elements of a tensor in its parts."""

    def __init__(self, cut: SavedTensor) -> None:
        self._cut, self._rectangles = cut, cut.rectangles()
        self._first = [0, *accumulate(map(len, cut.begins))]
        self._index = {
            (each.offset, each.shape): i for i, each in enumerate(self._rectangles)
        }

    def runs(self, places: Places, itemsize: int, span: Span) -> list[Run]:
        """Return the places of the elements, in order."""
        shape = self._cut.shape
        wanted = span.rectangle or Rectangle(shape, (0,) * len(shape), shape)
        same = self._index.get((wanted.offset, wanted.shape))
        if same is not None:
            return self._in_rectangle(same, places, itemsize, *span[:2])
        found: list[Run] = []
        for first, last in span.runs():
            # A run of the whole tensor may go on in the next rectangle.
            while first < last:
                index, inner, left = self._at(first)
                end = inner + min(last - first, left)
                found += self._in_rectangle(index, places, itemsize, inner, end)
                first += end - inner
        return found

    def _at(self, position: int) -> tuple[int, int, int]:
        """Return rectangle, element there and elements left of a row, of an element."""
        indices = []
        for size in reversed(self._cut.shape):
            position, index = divmod(position, size)
            indices.append(index)
        found = inner = 0
        for index, begins, size in zip(
            reversed(indices), self._cut.cuts, self._cut.shape, strict=True
        ):
            i = bisect_right(begins, index) - 1
            end = begins[i + 1] if i + 1 < len(begins) else size
            found = found * len(begins) + i
            inner = inner * (end - begins[i]) + index - begins[i]
        width = self._rectangles[found].width
        return found, inner, width - inner % width

    def _in_rectangle(
        self, index: int, places: Places, itemsize: int, start: int, stop: int
    ) -> list[Run]:
        """Return the places of elements of a rectangle, part by part."""
        begins, first = self._cut.begins[index], self._first[index]
        runs = []
        # A search: a parameter of a large model has a part per rank.
        at = bisect_right(begins, start) - 1
        while start < stop:
            end = min(stop, begins[at + 1]) if at + 1 < len(begins) else stop
            place = places[first + at]
            begin = place.begin + (start - begins[at]) * itemsize
            runs.append(Run(place.file, begin, begin + (end - start) * itemsize))
            start, at = end, at + 1
        return runs


def boxes_of(shape: tuple[int, ...], span: Span) -> str:
    """Return the elements as boxes of the whole tensor, as text for messages."""
    box = span.rectangle or Rectangle(shape, (0,) * len(shape), shape)
    boxes = moved(interval_boxes(box.shape, *span[:2]), box.offset)
    return ", ".join(f"[offsets {b.offsets} sizes {b.sizes}]" for b in boxes)


def told_of(manifest: Manifest, file: int, begin: int, end: int) -> str:
    """Return the names of the tensors in some bytes of a file, with boxes."""
    found = []
    for entry in entries_by_file(manifest)[file]:
        low, high = max(begin, entry.begin), min(end, entry.end)
        if low < high:
            size, box = entry.itemsize, entry.rectangle
            # Round outwards: an element counts if any byte is in the interval.
            start = entry.start + (low - entry.begin) // size
            stop = entry.start - (entry.begin - high) // size
            boxes = boxes_of(box.shape, Span(start, stop, box))
            found.append(f"{entry.of} {boxes}")
    return listed(found) or "nothing"
