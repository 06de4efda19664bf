"""Reads the native checkpoint directory as a ``Source``."""

from __future__ import annotations

import ctypes
import json
import os
import time
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.blocks import BlockFile, ReadRequest
from composable_fsdp.storage.commit import Folder, read_marker
from composable_fsdp.storage.directory import MANIFEST, within_limits
from composable_fsdp.storage.manifest import (
    Local,
    Manifest,
    Places,
    SavedTensor,
    Span,
    to_json,
)
from composable_fsdp.storage.source import Copy, Source, TensorInfo
from composable_fsdp.storage.storages import is_url, join, whole_path
from composable_fsdp.storage.validate import parse
from composable_fsdp.storage.values import decode
from composable_fsdp.storage.writer import aligned, host_buffer, is_plain

# Fixed bytes around the manifest, whose crc32 is verified before JSON is parsed.
_HEAD = b'{"crc32": "%08x", "time": "%019d", "manifest":\n'
_TAIL = b"\n}\n"
_TIME = _HEAD.index(b"%019d") + 4
"""The byte at which the time begins: the crc32 has 8 digits."""


def manifest_bytes(manifest: Manifest, path: str, after: int = 0) -> bytes:
    """Return the file of the manifest of ``path``, which a load takes; with a time."""
    document = to_json(manifest)
    # Raises if no load takes it.
    parse(document, join(path, MANIFEST))
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return _framed(text.encode(), max(time.time_ns(), after + 1))


def _framed(body: bytes, at: int) -> bytes:
    """Return the content of the file of a manifest that was committed at ``at``."""
    return _HEAD % (zlib.crc32(b"%d" % at + body), at) + body + _TAIL


def read_manifest(path: str, folder: Folder | None = None) -> tuple[Manifest, str]:
    """Read, verify and validate the manifest in the directory ``path``."""
    file = join(path, MANIFEST)
    data = read_marker(path, folder)
    size = len(_HEAD % (0, 0))
    body = data[size : len(data) - len(_TAIL)]
    # All bytes of the file: a change outside of the manifest counts as damage, too.
    at = data[_TIME : _TIME + 19]
    if not at.isdigit() or data != _framed(body, int(at)):
        raise CheckpointError(
            f"{file} ({len(data)} bytes) has another checksum than it says, or is not "
            "whole. It is damaged or was edited; use another checkpoint."
        )
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON ({error}).") from error
    # The parser stops at the limit of recursion, and the checks may stop there, too.
    with within_limits(file):
        return parse(document, file), data[:size].decode()


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
        wanted = span.within(self._cut.shape)
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
        found, inner, stride = 0, 0, prod(self._cut.shape)
        for begins, size in zip(self._cut.cuts, self._cut.shape, strict=True):
            stride //= size
            index, position = divmod(position, stride)
            i = bisect_right(begins, index) - 1
            end = (*begins, size)[i + 1]
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


class NativeSource(Source):
    """A directory that ``save`` wrote; ``manifest`` gives the place of every entry."""

    def __init__(self, path: str | os.PathLike[str], *, values: bool = True) -> None:
        self.path = whole_path(path)
        folder = Folder(self.path) if is_url(self.path) else None
        self.manifest, self.fingerprint = read_manifest(self.path, folder)
        manifest = self.manifest
        sizes = None if folder is None else folder.sizes
        self.files = [
            BlockFile(self.path, manifest, i, self._told, sizes)
            for i in range(len(manifest.files))
        ]
        self._saved: dict[str, SavedTensor] = {}
        self._part_runs: dict[str, PartRuns] = {}
        self._staged: list[Tensor] | None = None
        self.local_ranks, self.saved_ranks = len(manifest.local), len(manifest.per_rank)
        told = [n for own in manifest.local for t in own.tensors for n in t.fqns]
        states = [name for own in manifest.local for name in own.own_states]
        self.local_tensors = frozenset(told + states)
        self.wrappers = manifest.wrappers
        own = _local_of(manifest.local, None)
        self._index(own)
        self.param_groups = self.extra = None
        try:
            if values:
                self._decode(own)
        except BaseException:
            self.close()
            raise

    def on_rank(self, rank: int | None) -> None:
        if self.local_ranks:
            own = _local_of(self.manifest.local, rank)
            self._index(own)
            # Set by ``_decode``: without it, the object was made without values.
            if "own_states" in vars(self):
                self._decode(own)

    def _index(self, own: Local) -> None:
        """Build ``model``, ``aliases`` and ``optim``."""
        model: dict[str, TensorInfo] = {}
        aliases: dict[str, str] = {}
        optim: dict[str, dict[str, TensorInfo]] = {}
        self._saved.clear()
        self._part_runs.clear()
        for each in (*self.manifest.tensors, *own.tensors):
            name, *others = each.fqns
            self._saved[name] = each
            model[name] = TensorInfo(each.dtype, each.shape)
            aliases.update(dict.fromkeys(others, name))
            if each.states:
                optim[name] = {
                    k: TensorInfo(v.dtype, each.shape) for k, v in each.states.items()
                }
        self.model, self.aliases, self.optim = model, aliases, optim

    def _decode(self, own: Local) -> None:
        """Decode the JSON values of the manifest, which are small and always needed."""
        manifest = self.manifest
        values: dict[str, dict[str, Any]] = {}
        for each in (*manifest.tensors, *own.tensors):
            if each.values:
                found = {k: self._value(v) for k, v in each.values.items()}
                values[each.fqns[0]] = found
        self.optim_values = values
        if manifest.param_groups is not None:
            groups = [*manifest.param_groups, *(own.param_groups or ())]
            self.param_groups = [self._value(group) for group in groups]
        self.extra = self._value(manifest.extra)
        own_states = {**manifest.own_states, **own.own_states}
        self.own_states = {k: self._value(v) for k, v in own_states.items()}

    def _value(self, value: Any) -> Any:
        """Decode a JSON value; read the loose tensors that the value refers to."""
        return decode(value, self.path, self._loose)

    def _loose(self, index: int) -> Tensor:
        """Read the loose tensor ``index``."""
        stored = self.manifest.loose[index]
        (file, begin), size = stored.at, stored.dtype.itemsize
        run = Run(file, begin, begin + stored.numel * size)
        return self._read([run], stored.dtype, ()).view(stored.shape)

    def rng(self, rank: int, world_size: int) -> dict[str, Any] | None:
        """Return the random state that the same rank saved, at any world size."""
        states = self.manifest.rng
        return self._value(states[rank]) if rank < len(states) else None

    def rank_values(self, rank: int) -> Any:
        if not 0 <= rank < self.saved_ranks:
            raise KeyError(rank)
        return self._value(self.manifest.per_rank[rank])

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        return self._interval_of(name, None, start, stop)

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        return self._interval_of(name, state, start, stop)

    def _interval_of(
        self, name: str, state: str | None, start: int, stop: int
    ) -> Tensor:
        """Return elements ``[start, stop)`` of a tensor or state."""
        what = name, state, Span(start, stop)
        return self._read(self._runs(*what), self._info(name, state).dtype, what)

    def prepare(self, copies: Sequence[Copy]) -> None:
        self._staged = self._stage([copy for copy in copies if not copy.is_new])
        waiting = iter(self._staged or ())
        # New memory is filled now, if the file's bytes can be read straight into it.
        targets = [
            (copy.into if self._is_direct(copy) else None)
            if copy.is_new
            else next(waiting, None)
            for copy in copies
        ]
        for file, wants in zip(self.files, self._wants(copies, targets), strict=True):
            file.check(wants)
        for copy in copies:
            if copy.is_new and not self._is_direct(copy):
                copy.into.copy_(self.read(copy).view(copy.into.shape))

    def finish(self, copies: Sequence[Copy]) -> None:
        left = [copy for copy in copies if not copy.is_new]
        direct = [copy for copy in left if self._is_direct(copy)]
        if self._staged is not None:
            for copy, staged in zip(left, self._staged, strict=True):
                # As the snapshot of a save: threads of an operator wait for each other.
                if self._is_direct(copy):
                    to, size = copy.into.data_ptr(), staged.numel()
                    ctypes.memmove(to, staged.data_ptr(), size)
                    continue
                dtype = self._info(copy.name, copy.state).dtype
                copy.into.copy_(staged.view(dtype).view(copy.into.shape))
            self._staged, left = None, []
        else:
            # A CPU destination of the saved dtype is filled by the read itself.
            wants = self._wants(direct, [copy.into for copy in direct])
            for file, wanted in zip(self.files, wants, strict=True):
                file.fill(wanted)
        for copy in direct:
            # A tensor saved for backward before the load has other values now.
            if not copy.into.is_inference():
                increment_version(copy.into)
        super().finish([copy for copy in left if not self._is_direct(copy)])

    def __enter__(self) -> NativeSource:
        return self

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def _is_direct(self, copy: Copy) -> bool:
        """Return whether the file's bytes can be read straight into ``copy.into``."""
        dtype = self._info(copy.name, copy.state).dtype
        return copy.into.dtype == dtype and is_plain(copy.into)

    def _stage(self, copies: Sequence[Copy]) -> list[Tensor] | None:
        """Return memory in which verified bytes wait until all ranks agree, or None."""
        # From the page cache, a second read costs less than a copy in new memory.
        if not is_url(self.path):
            return None
        dtypes = [self._info(copy.name, copy.state).dtype for copy in copies]
        pairs = zip(copies, dtypes, strict=True)
        sizes = [copy.span.numel * dtype.itemsize for copy, dtype in pairs]
        # Each aligned for every dtype.
        *begins, end = accumulate(map(aligned, sizes), initial=0)
        buffer = host_buffer(end)
        return [buffer[at : at + n] for at, n in zip(begins, sizes, strict=True)]

    def _wants(
        self, copies: Sequence[Copy], targets: Sequence[Tensor | None]
    ) -> list[list[ReadRequest]]:
        """Return the read requests per file, in file order."""
        found: list[list[ReadRequest]] = [[] for _ in self.files]
        for copy, into in zip(copies, targets, strict=True):
            at = 0
            for run in self._runs(*copy[:3]):
                found[run.file].append(ReadRequest(run.begin, run.end, into, at, copy))
                at += run.end - run.begin
        for wants in found:
            wants.sort(key=lambda want: want.begin)
        return found

    def _read(
        self, runs: list[Run], dtype: torch.dtype, what: tuple[Any, ...]
    ) -> Tensor:
        """Verify and read ``runs`` into a new CPU tensor."""
        # Before allocating: a damaged manifest may claim any size.
        for run in runs:
            self.files[run.file].open()
        count = sum(run.end - run.begin for run in runs) // dtype.itemsize
        result, at = torch.empty(count, dtype=dtype, device="cpu"), 0
        for run in runs:
            want = ReadRequest(run.begin, run.end, result, at, what)
            self.files[run.file].check([want])
            at += run.end - run.begin
        return result

    def _info(self, name: str, state: str | None) -> TensorInfo:
        """Return dtype and shape of a tensor of the model, or of an optimizer state."""
        return self.model[name] if state is None else self.optim[name][state]

    def _runs(self, name: str, state: str | None, span: Span) -> list[Run]:
        """Return the places of elements as byte intervals."""
        info, box = self._info(name, state), span.rectangle
        numel = info.numel if box is None else box.numel
        if not 0 <= span.start <= span.stop <= numel:
            raise ValueError(
                f"elements [{span.start}, {span.stop}) were asked of {quoted(name)}, "
                f"which has {numel}."
            )
        saved = self._saved[name]
        # Made when a name is read: a rank of many reads few.
        if name not in self._part_runs:
            self._part_runs[name] = PartRuns(saved)
        places: Places = saved.parts if state is None else saved.states[state].parts
        return self._part_runs[name].runs(places, info.dtype.itemsize, span)

    def _told(self, what: tuple[Any, ...]) -> str:
        """Name a slice in error messages; the tuple begins with (name, state, span)."""
        if not what:
            return ""
        name, state, span = what[:3]
        of = f"state {state!r} of " if state is not None else ""
        return f"{of}{quoted(name)} {span.told(self._info(name, state).shape)}"


def _local_of(ranks: Sequence[Local], rank: int | None) -> Local:
    """Return what ``rank`` has saved for itself; nothing for another rank."""
    is_there = rank is not None and rank < len(ranks)
    return ranks[rank or 0] if is_there else Local((), {}, None)
