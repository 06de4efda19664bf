"""Checks how the fields of a manifest fit together, before any payload is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.manifest import (
    DAMAGED,
    FORMAT,
    VERSION,
    Json,
    Local,
    MalformedError,
    Manifest,
    SavedTensor,
    Span,
    Stored,
    UnexpectedError,
    excerpt,
    parser_of,
)
from composable_fsdp.storage.values import decode

RNG_KEYS = ("torch", "cuda", "others")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}\Z")


class Entry(NamedTuple):
    """The bytes ``[begin, end)`` of a file's payload, which hold a part of a tensor."""

    begin: int
    end: int
    itemsize: int
    name: str
    state: str | None
    span: Span

    @property
    def of(self) -> str:
        """The words for the tensor, and for the rectangle if there are several."""
        of = self.name if self.state is None else f"state {self.state!r} of {self.name}"
        box = self.span.rectangle
        if box is None or box.shape == box.whole:
            return of
        return f"the rectangle {box.shape} at {box.offset} of {of}"

    @property
    def what(self) -> str:
        """The words for the part."""
        start, stop, box = self.span
        if box is None or (start, stop) == (0, box.numel):
            return self.of
        return f"elements {start} to {stop} of {self.of}"


_HEADER = Entry(0, 0, 1, "the header", None, Span(0, 1))


def parse(document: Json, file: str) -> Manifest:
    """Return the manifest in ``document``, if all fields fit; opens no file."""
    try:
        _require_version(document, file)
        manifest: Manifest = parser_of(Manifest)(document)
        _check_files(manifest)
        _check_names(manifest)
        for _, tensor in _tensors(manifest):
            _check_tensor(tensor)
        # After the checks of files and tensors, on which these rely.
        entries_by_file(manifest)
        _check_ranks(manifest)
        _check_values(manifest, file)
    except MalformedError as error:
        raise CheckpointError(f"{file}: {error}. {DAMAGED}") from None
    return manifest


def _require_version(document: Json, file: str) -> None:
    """Check format and version of the document."""
    # First, because another version, or another program, may have other fields.
    found = document.get("format") if isinstance(document, dict) else document
    if found != FORMAT:
        raise UnexpectedError("format", repr(FORMAT), found)
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{file} is of format version {excerpt(version)}; this version of "
            f"composable_fsdp reads version {VERSION}. Read it with the release that "
            "wrote it, or a newer one."
        )


def _check_files(manifest: Manifest) -> None:
    """Check the files: plain, unique names, a checksum per block, a file per rank."""
    names = [each.name for each in manifest.files]
    for each in manifest.files:
        # No separator of any system, no hidden file, no name that is too long.
        if not _PLAIN_NAME.match(each.name):
            name = each.name[:80]
            raise MalformedError(
                f"file name {name!r} is no plain name inside the directory"
            )
        blocks = -(-each.payload_nbytes // manifest.block_nbytes)
        if len(each.blocks) != blocks:
            raise MalformedError(
                f"{each.name} has {len(each.blocks)} checksums for "
                f"{each.payload_nbytes} bytes of payload, expected {blocks}"
            )
    if len(set(names)) != len(names):
        raise MalformedError(f"a file stands twice in {names[:8]}")
    # Every rank writes a file, even without any entry.
    if len(names) != (ranks := manifest.world_size):
        told = f"there are {len(names)} files of {ranks} ranks, expected one each"
        raise MalformedError(told)


def _check_names(manifest: Manifest) -> None:
    """Check that no two tensors have the same name."""
    # Not of ``local``: ranks may have the same names there.
    names = [name for tensor in manifest.tensors for name in tensor.fqns]
    _refuse_twice([*names, *manifest.wrappers])
    around = {name.rpartition(".")[0] for name in (*names, *manifest.wrappers)}
    # A load would compare the facts of nothing.
    if bare := sorted(manifest.wrappers.keys() - around):
        raise MalformedError(f"{quoted(bare[0])} wraps tensors, and none is there")
    for own in manifest.local:
        _refuse_twice([*names, *(n for tensor in own.tensors for n in tensor.fqns)])
        _refuse_twice([*manifest.own_states, *own.own_states])


def _refuse_twice(names: list[str]) -> None:
    """Refuse a name that stands in ``names`` twice."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise MalformedError(f"{listed(map(quoted, repeated))} stand there twice")


def _covers(begins: tuple[int, ...], size: int) -> bool:
    """Return whether intervals that begin at ``begins`` cover ``[0, size)``."""
    # A parameter without elements has a single part without elements.
    rises = all(a < b for a, b in pairwise((*begins, max(size, 1))))
    return bool(begins) and not begins[0] and rises


def _check_tensor(cut: SavedTensor) -> None:
    """Check that the rectangles cover the tensor, and the parts each rectangle."""
    where = f"{quoted(cut.fqns[0])} of shape {cut.shape}"
    fits = len(cut.cuts) == len(cut.shape) and all(map(_covers, cut.cuts, cut.shape))
    # Counted before the rectangles are made: the product of hostile cuts is huge.
    count = 1
    for begins in cut.cuts:
        count = min(count * len(begins), len(cut.begins) + 1)
    if not fits or count != len(cut.begins):
        cuts = [begins[:8] for begins in cut.cuts[:8]]
        raise MalformedError(
            f"{where} has {len(cut.begins)} rectangles cut at {cuts}, which do not "
            "cover it"
        )
    # A gap between parts would come back as bytes of another tensor.
    for begins, rectangle in zip(cut.begins, cut.rectangles(), strict=True):
        if not _covers(begins, rectangle.numel):
            raise MalformedError(
                f"{where} has parts that begin at elements {begins[:8]} of the "
                f"rectangle at {rectangle.offset}, which do not cover it"
            )
    parts = sum(map(len, cut.begins))
    for state, _, found in cut.entries():
        if len(found) != parts:
            of = where if state is None else f"state {state!r} of {where}"
            raise MalformedError(f"{of} has {len(found)} parts, expected {parts}")
    # A reader would take either of the two.
    if double := sorted(cut.states.keys() & cut.values.keys()):
        raise MalformedError(f"state {double[0]!r} of {where} stands there twice")


def _check_ranks(manifest: Manifest) -> None:
    """Check the values of single ranks, and that groups list known parameters."""
    for what in ("local", "rng", "per_rank"):
        if (count := len(getattr(manifest, what))) not in (0, manifest.world_size):
            told = f"{what} has {count} values for {manifest.world_size} ranks"
            raise MalformedError(told)
    for r, state in enumerate(manifest.rng):
        if not isinstance(state, dict) or not state.keys() <= set(RNG_KEYS):
            raise MalformedError(f"rng[{r}] holds something else than {RNG_KEYS}")
    names = {name for tensor in manifest.tensors for name in tensor.fqns}
    _check_groups(manifest.param_groups, names, "param_groups")
    for r, own in enumerate(manifest.local):
        mine = {name for tensor in own.tensors for name in tensor.fqns}
        _check_groups(own.param_groups, names | mine, f"local[{r}].param_groups")


def _check_groups(groups: list[Json] | None, known: set[str], where: str) -> None:
    """Check that the options of groups list parameters that are ``known``."""
    for g, group in enumerate(groups or ()):
        members = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, list) or not all(
            isinstance(name, str) and name in known for name in members
        ):
            raise MalformedError(f"{where}[{g}] does not list parameters by name")


def _check_values(manifest: Manifest, file: str) -> None:
    """Check that every JSON value can be decoded, and uses loose tensors once each."""
    used: Counter[int] = Counter()

    def note(index: int) -> Stored:
        # Stands in for the reader; bytes and arrays are checked by dtype and shape.
        if not 0 <= index < len(manifest.loose):
            raise MalformedError(f"loose tensor {index} is asked for and is not there")
        used[index] += 1
        return manifest.loose[index]

    for value, where in _values(manifest):
        decode(value, f"{file}: {where}", note)
    if len(used) != len(manifest.loose) or any(n > 1 for n in used.values()):
        raise MalformedError("loose tensors are not referred to once each")


def _values(manifest: Manifest) -> Iterator[tuple[Json, str]]:
    """Yield every JSON value, with its place for messages."""
    yield manifest.extra, "extra"
    for ranks, what in ((manifest.rng, "rng"), (manifest.per_rank, "per_rank")):
        for r, value in enumerate(ranks):
            yield value, f"{what}[{r}]"
    groups = manifest.param_groups
    whole = Local(manifest.tensors, manifest.own_states, groups)
    places = [(own, f"local[{r}].") for r, own in enumerate(manifest.local)]
    for own, where in [(whole, ""), *places]:
        for name, value in own.own_states.items():
            yield value, f"{where}own_states[{name!r}]"
        for g, group in enumerate(own.param_groups or ()):
            yield group, f"{where}param_groups[{g}]"
        for tensor in own.tensors:
            for key, value in tensor.values.items():
                yield value, f"{where}state {key!r} of {quoted(tensor.fqns[0])}"


def _tensors(manifest: Manifest) -> Iterator[tuple[str, SavedTensor]]:
    """Yield the tensors of all ranks, and of single ranks, with names for messages."""
    for tensor in manifest.tensors:
        yield quoted(tensor.fqns[0]), tensor
    # Names repeat over ranks, so the message needs the rank.
    for r, own in enumerate(manifest.local):
        for tensor in own.tensors:
            yield f"{quoted(tensor.fqns[0])} of rank {r}", tensor


def _all_entries(manifest: Manifest) -> Iterator[tuple[int, Entry]]:
    """Yield every entry of the manifest, with the number of the file."""
    for name, tensor in _tensors(manifest):
        spans = list(tensor.spans())
        for state, dtype, parts in tensor.entries():
            size = dtype.itemsize
            for at, span in zip(parts, spans, strict=True):
                end = at.begin + span.numel * size
                yield at.file, Entry(at.begin, end, size, name, state, span)
    for i, each in enumerate(manifest.loose):
        size, at, shape = each.dtype.itemsize, each.at, each.shape
        span = Span(0, each.numel, Span(0, 0).within(shape))
        name = f"loose tensor {i} (extra, random states)"
        end = at.begin + each.numel * size
        yield at.file, Entry(at.begin, end, size, name, None, span)


def entries_by_file(manifest: Manifest) -> list[list[Entry]]:
    """Return the entries of each file in file order; they fill the payload exactly."""
    found: list[list[Entry]] = [[] for _ in manifest.files]
    for number, entry in _all_entries(manifest):
        if number >= len(found):
            told = f"{entry.what} lies in file {number} of {len(found)}"
            raise MalformedError(told)
        size, name = manifest.files[number].payload_nbytes, manifest.files[number].name
        if entry.end > size:
            raise MalformedError(
                f"{entry.what} ends at byte {entry.end} of {size} bytes of payload in "
                f"{name}"
            )
        found[number].append(entry)
    for each, entries in zip(manifest.files, found, strict=True):
        # By the end, too: an empty tensor comes before the next one at the same begin.
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        end, last = 0, _HEADER
        for entry in entries:
            # Aligned in the file, too: readers that map the file need aligned elements.
            if entry.begin != end or (each.header_nbytes + end) % entry.itemsize:
                raise MalformedError(
                    f"in {each.name}, {entry.what} begins at byte {entry.begin}, "
                    f"expected {end}, where {last.what} ends"
                )
            end, last = entry.end, entry
        if end != (size := each.payload_nbytes):
            told = f"in {each.name}, {last.what} ends at byte {end} of {size} bytes"
            raise MalformedError(f"{told} of payload")
    return found


def told_of(manifest: Manifest, file: int, begin: int, end: int) -> str:
    """Return the names of the tensors in some bytes of a file, with boxes."""
    found = []
    for entry in entries_by_file(manifest)[file]:
        low, high = max(begin, entry.begin), min(end, entry.end)
        if low < high:
            size, (begins, _, box) = entry.itemsize, entry.span
            # Round outwards: an element counts if any byte is in the interval.
            start = begins + (low - entry.begin) // size
            stop = begins - (entry.begin - high) // size
            found.append(f"{entry.of} {Span(start, stop, box).told(())}")
    return listed(found) or "nothing"
