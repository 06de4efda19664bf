"""Checks how the fields of a manifest fit together, before any payload is read.

- All names are unique.
- The slots of a region do not overlap, and the shards cover the region.
- The entries of a file fill the payload: no overlap, no gap, no entry outside.
- File names are plain names, so no file outside the directory is ever opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.manifest import (
    Cut,
    EntryPlace,
    Json,
    Manifest,
    Region,
    RegionState,
)
from composable_fsdp.storage.parse import parse_fields
from composable_fsdp.storage.validate_values import check_values, names_of, refuse


class Entry(NamedTuple):
    """The bytes ``[begin, end)`` of a tensor, or of a shard, in a file's payload.

    ``what`` is the name for messages. For a shard, ``region`` and ``shard`` (a number)
    say which; ``state`` is None for the shard of the parameters.
    """

    begin: int
    end: int
    itemsize: int
    what: str
    region: Region | None = None
    shard: int = 0
    state: RegionState | None = None
    shape: tuple[int, ...] = ()
    """The shape of a whole tensor; empty for a shard."""


def parse(document: Json, file: str) -> Manifest:
    """Return the manifest in ``document``, if all fields are consistent.

    ``file`` is the document's name in messages. No file is opened; memory and time are
    bounded by the size of the document.

    Raises: CheckpointError, naming the file, and the parameter if there is any.
    """
    manifest = parse_fields(document, file)
    _check_files(manifest, file)
    _check_names(manifest, file)
    for region in manifest.regions:
        _check_region(region, file)
    for cut in manifest.cuts:
        _check_cut(cut, file)
    # After the checks of files and regions, on which this check relies.
    entries_by_file(manifest, file)
    check_values(manifest, file)
    return manifest


def _check_files(manifest: Manifest, file: str) -> None:
    """Check the files: plain, unique names, a checksum per block, a file per rank."""
    names = [each.name for each in manifest.files]
    for each in manifest.files:
        if not _is_plain(each.name):
            raise refuse(
                file,
                f"file name {each.name[:80]!r} is no plain name inside the directory",
            )
        blocks = -(-each.payload_nbytes // manifest.block_nbytes)
        # Without a checksum for every block, a part of the payload could not be
        # verified.
        if len(each.blocks) != blocks:
            raise refuse(
                file,
                f"{each.name} has {len(each.blocks)} checksums for "
                f"{each.payload_nbytes} bytes of payload, expected {blocks}",
            )
    if len(set(names)) != len(names):
        raise refuse(file, f"a file stands twice in {names[:8]}")
    # Every rank writes a file, even without any entry.
    if len(names) != manifest.world_size:
        raise refuse(
            file,
            f"there are {len(names)} files of {manifest.world_size} ranks, expected "
            "one each",
        )


def _is_plain(name: str) -> bool:
    """Return whether ``name`` is a file name without a path, on any system."""
    # No separator of any operating system, no hidden file, no name that is too long.
    allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    return 0 < len(name) <= 255 and allowed and not name.startswith(".")


def _check_names(manifest: Manifest, file: str) -> None:
    """Check that no two tensors have the same name."""
    names = list(names_of(manifest))
    _refuse_twice([*names, *manifest.wrappers], file)
    around = {name.rpartition(".")[0] for name in names}
    around |= {name.rpartition(".")[0] for name in manifest.wrappers}
    # A load would compare the facts of nothing.
    if bare := sorted(manifest.wrappers.keys() - around):
        raise refuse(file, f"{quoted(bare[0])} wraps tensors, and none is there")
    for own in manifest.local:
        mine = [name for single in own.singles for name in single.fqns]
        _refuse_twice([*names, *mine], file)
        _refuse_twice([*manifest.own_states, *own.own_states], file)


def _refuse_twice(names: list[str], file: str) -> None:
    """Raise CheckpointError if a name stands in ``names`` twice."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise refuse(file, f"{listed(map(quoted, repeated))} stand there twice")


def _covers(begins: tuple[int, ...], size: int) -> bool:
    """Return whether intervals that begin at ``begins`` cover ``[0, size)``."""
    # A parameter without elements has a single part without elements.
    rises = all(a < b for a, b in pairwise((*begins, max(size, 1))))
    return bool(begins) and not begins[0] and rises


def _check_cut(cut: Cut, file: str) -> None:
    """Check that the rectangles of a cut cover the parameter, and the parts those."""
    where = f"{quoted(cut.fqns[0])} of shape {cut.shape}"
    fits = len(cut.cuts) == len(cut.shape) and all(map(_covers, cut.cuts, cut.shape))
    # Counted before the rectangles are made: the product of hostile cuts is huge.
    count = 1
    for begins in cut.cuts:
        count = min(count * len(begins), len(cut.begins) + 1)
    if not fits or count != len(cut.begins):
        raise refuse(
            file,
            f"{where} has {len(cut.begins)} rectangles cut at "
            f"{[begins[:8] for begins in cut.cuts[:8]]}, which do not cover it",
        )
    # A gap between parts would come back as bytes of another tensor.
    for begins, rectangle in zip(cut.begins, cut.rectangles(), strict=True):
        if not _covers(begins, rectangle.numel):
            raise refuse(
                file,
                f"{where} has parts that begin at elements {begins[:8]} of the "
                f"rectangle at {rectangle.offset}, which do not cover it",
            )
    parts = sum(map(len, cut.begins))
    if parts != len(cut.parts):
        raise refuse(file, f"{where} has {len(cut.parts)} parts, expected {parts}")
    _check_states(cut, where, file)


def _check_states(cut: Cut, where: str, file: str) -> None:
    """Check that each state is stored once, with a part for each of the parameter."""
    count = len(cut.parts)
    for name, state in cut.states.items():
        if len(state.parts) != count:
            raise refuse(
                file,
                f"state {name!r} of {where} has {len(state.parts)} parts, expected "
                f"{count}",
            )
    # As of a slot: a reader would take either of the two.
    if double := sorted(cut.states.keys() & cut.values.keys()):
        raise refuse(file, f"state {double[0]!r} of {where} stands there twice")


def _check_region(region: Region, file: str) -> None:
    """Check that shards cover the region, and that slots and states do not overlap."""
    where = f"region of unit {quoted(region.unit)}"
    ranks = len(region.shards)
    if not ranks or region.shard_numel * ranks != region.padded_numel:
        raise refuse(
            file,
            f"the {where} has padded_numel {region.padded_numel} in {ranks} shards of "
            f"{region.shard_numel}, which do not cover it",
        )
    end, last = 0, ""
    for slot in region.slots:
        # Gaps between slots are allowed: alignment padding.
        if slot.offset < end:
            raise refuse(
                file,
                f"{quoted(slot.fqns[0])} begins at element {slot.offset} of the "
                f"{where}, where {quoted(last)} has not ended ({end})",
            )
        end, last = slot.offset + slot.numel, slot.fqns[0]
        if end > region.padded_numel:
            raise refuse(
                file,
                f"{quoted(last)} of shape {slot.shape} ends at element {end} of the "
                f"{where}, which has {region.padded_numel}",
            )
    # (state name, slot index): a state may have several dtypes, hence several entries,
    # but a parameter has each state only once.
    seen: set[tuple[str, int]] = set()
    for state in region.states:
        _check_state(region, state, where, file)
        mine = {(state.name, index) for index in state.slots}
        if seen & mine:
            raise refuse(
                file, f"state {state.name!r} of the {where} stands there twice"
            )
        seen |= mine
    for index, slot in enumerate(region.slots):
        if double := [name for name in slot.values if (name, index) in seen]:
            raise refuse(
                file,
                f"state {double[0]!r} of {quoted(slot.fqns[0])} stands there twice",
            )


def _check_state(region: Region, state: RegionState, where: str, file: str) -> None:
    """Check the slots and the number of shards of a state."""
    indices = state.slots
    ordered = all(a < b for a, b in pairwise(indices))
    if not indices or not ordered or indices[-1] >= len(region.slots):
        raise refuse(
            file,
            f"state {state.name!r} of the {where} is of parameters {indices[:8]}, "
            f"expected some of 0 to {len(region.slots) - 1} in order",
        )
    if len(state.shards) != len(region.shards):
        raise refuse(
            file,
            f"state {state.name!r} of the {where} has {len(state.shards)} shards, "
            f"expected {len(region.shards)} "
            f"({quoted(region.slots[indices[0]].fqns[0])})",
        )


def all_entries(manifest: Manifest) -> Iterator[tuple[EntryPlace, Entry]]:
    """Yield every entry of the manifest, with the place."""
    for region in manifest.regions:
        count = region.shard_numel
        first = quoted(region.slots[0].fqns[0]) if region.slots else "nothing"
        # ``..``: the region may hold more parameters than the first.
        of = f"unit {quoted(region.unit)} ({first} ..)"
        for r, at in enumerate(region.shards):
            size = region.dtype.itemsize
            end = at.begin + count * size
            what = f"shard {r} of {of}"
            yield at, Entry(at.begin, end, size, what, region, r)
        for state in region.states:
            size = state.dtype.itemsize
            for r, at in enumerate(state.shards):
                end = at.begin + count * size
                what = f"shard {r} of state {state.name!r} of {of}"
                yield at, Entry(at.begin, end, size, what, region, r, state)
    for cut in manifest.cuts:
        yield from _entries_of_cut(cut)
    # Entries of whole tensors: tensors in no unit, their optimizer states, loose
    # tensors.
    singles = [(quoted(single.fqns[0]), single) for single in manifest.singles]
    # Names repeat over ranks, so the message needs the rank.
    for r, own in enumerate(manifest.local):
        singles += [(f"{quoted(s.fqns[0])} of rank {r}", s) for s in own.singles]
    whole = [(name, single.tensor) for name, single in singles]
    for name, single in singles:
        whole += [(f"state {k!r} of {name}", v) for k, v in single.states.items()]
    whole += [
        (f"loose tensor {i} (extra, random states)", each)
        for i, each in enumerate(manifest.loose)
    ]
    for what, stored in whole:
        size, at = stored.dtype.itemsize, stored.at
        end = at.begin + stored.numel * size
        yield at, Entry(at.begin, end, size, what, shape=stored.shape)


def _entries_of_cut(cut: Cut) -> Iterator[tuple[EntryPlace, Entry]]:
    """Yield the entries of the parts of all rectangles, with the places."""
    name = quoted(cut.fqns[0])
    kinds = [(name, cut.dtype, cut.parts)]
    kinds += [
        (f"state {k!r} of {name}", s.dtype, s.parts) for k, s in cut.states.items()
    ]
    rectangles = list(zip(cut.rectangles(), cut.begins, strict=True))
    for what, dtype, parts in kinds:
        # All parts in a row; ``_check_cut`` has counted them.
        places = iter(parts)
        for rectangle, begins in rectangles:
            of = what
            if len(rectangles) > 1:
                of = f"the rectangle {rectangle.shape} at {rectangle.offset} of {what}"
            for start, stop in pairwise((*begins, rectangle.numel)):
                at = next(places)
                end = at.begin + (stop - start) * dtype.itemsize
                told = f"elements {start} to {stop} of {of}"
                shape = (stop - start,)
                yield at, Entry(at.begin, end, dtype.itemsize, told, shape=shape)


def entries_by_file(manifest: Manifest, file: str) -> list[list[Entry]]:
    """Return the entries of each file in file order; they fill the payload exactly.

    Raises: CheckpointError, if they do not.
    """
    found: list[list[Entry]] = [[] for _ in manifest.files]
    for place, entry in all_entries(manifest):
        if place.file >= len(found):
            raise refuse(
                file, f"{entry.what} lies in file {place.file} of {len(found)}"
            )
        size = manifest.files[place.file].payload_nbytes
        if entry.end > size:
            raise refuse(
                file,
                f"{entry.what} ends at byte {entry.end} of {size} bytes of payload in "
                f"{manifest.files[place.file].name}",
            )
        found[place.file].append(entry)
    for each, entries in zip(manifest.files, found, strict=True):
        # By the end, too: an empty tensor comes before the next entry with the same
        # begin.
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        end, last = 0, "the header"
        for entry in entries:
            # An entry must also be aligned to the element size, counted from the file's
            # start: readers that map the file need aligned elements.
            if entry.begin != end or (each.header_nbytes + end) % entry.itemsize:
                raise refuse(
                    file,
                    f"in {each.name}, {entry.what} begins at byte {entry.begin}, "
                    f"expected {end}, where {last} ends",
                )
            end, last = entry.end, entry.what
        if end != each.payload_nbytes:
            raise refuse(
                file,
                f"in {each.name}, {last} ends at byte {end} of "
                f"{each.payload_nbytes} bytes of payload",
            )
    return found
