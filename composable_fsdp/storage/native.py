"""The native checkpoint directory as a ``Source``."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import shown
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.storage.blocks import BlockFile
from composable_fsdp.storage.directory import MANIFEST, open_plain
from composable_fsdp.storage.manifest import (
    Manifest,
    Place,
    Region,
    Slot,
    Stored,
)
from composable_fsdp.storage.source import Source, TensorInfo
from composable_fsdp.storage.validate import Entry, entries_by_file, parse
from composable_fsdp.storage.values import decode

_HEAD = b'{"crc32": "%08x", "manifest":\n'
_TAIL = b"\n}\n"
_NAMED_IN_MESSAGES = 20


def manifest_bytes(manifest: Manifest) -> bytes:
    """The text of the manifest file: JSON, with a checksum of the manifest itself."""
    body = json.dumps(
        manifest.to_json(), allow_nan=False, separators=(",", ":")
    ).encode()
    return _HEAD % zlib.crc32(body) + body + _TAIL


def read_manifest(path: str) -> tuple[Manifest, str]:
    """Read, verify and validate the manifest in the directory ``path``.

    With its checksum, which is also one of all checksums in it.

    Raises: CheckpointError, naming the file.
    """
    file = os.path.join(path, MANIFEST)
    with open(open_plain(file), "rb") as found:
        data = found.read()
    size = len(_HEAD % 0)
    body = data[size : len(data) - len(_TAIL)]
    if data != _HEAD % zlib.crc32(body) + body + _TAIL:
        raise CheckpointError(
            f"{file} ({len(data)} bytes) has another checksum than it says, or is not "
            "whole. It is damaged or was edited; use another checkpoint."
        )
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON ({error}).") from error
    return parse(document, file), data[:size].decode()


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements ``[start, stop)`` of a tensor, and the byte where they lie."""

    start: int
    stop: int
    file: int
    begin: int


class NativeSource(Source):
    """A directory that ``save`` wrote. ``manifest`` says what lies where.

    Without ``values`` the loose tensors are not read, so nothing of the payload is.

    Raises: CheckpointError, if the manifest is missing, damaged or makes no sense.
    """

    def __init__(self, path: str | os.PathLike[str], *, values: bool = True) -> None:
        self.path = os.path.abspath(path)
        self.manifest, self.fingerprint = read_manifest(self.path)
        manifest = self.manifest
        entries = entries_by_file(manifest, os.path.join(self.path, MANIFEST))
        self.files = [
            BlockFile(os.path.join(self.path, file.name), file, _Blame(found, manifest))
            for file, found in zip(manifest.files, entries, strict=True)
        ]
        self._slots: dict[str, tuple[Region, Slot]] = {}
        self._wholes: dict[str, Stored] = {}
        self._states: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._index()
        self.param_groups = self.extra = None
        try:
            if values:
                self._decode()
        except BaseException:
            self.close()
            raise

    def _index(self) -> None:
        model: dict[str, TensorInfo] = {}
        aliases: dict[str, str] = {}
        optim: dict[str, dict[str, TensorInfo]] = {}
        for region in self.manifest.regions:
            for slot in region.slots:
                name, *others = slot.fqns
                model[name] = TensorInfo(region.dtype, slot.shape)
                self._slots[name] = region, slot
                aliases.update(dict.fromkeys(others, name))
            for state in region.states:
                for index in state.slots:
                    slot = region.slots[index]
                    name = slot.fqns[0]
                    info = TensorInfo(state.dtype, slot.shape)
                    optim.setdefault(name, {})[state.name] = info
                    self._states[name, state.name] = region, (state, slot)
        for single in self.manifest.singles:
            name, *others = single.fqns
            model[name] = TensorInfo(single.tensor.dtype, single.tensor.shape)
            self._wholes[name] = single.tensor
            aliases.update(dict.fromkeys(others, name))
            for key, stored in single.states.items():
                optim.setdefault(name, {})[key] = TensorInfo(stored.dtype, stored.shape)
                self._states[name, key] = stored, None
        self.model, self.aliases, self.optim = model, aliases, optim

    def _decode(self) -> None:
        """Read what is small and always wanted: the values in the manifest."""
        manifest = self.manifest
        values: dict[str, dict[str, Any]] = {}
        held = [(s.fqns[0], s.values) for r in manifest.regions for s in r.slots]
        held += [(single.fqns[0], single.values) for single in manifest.singles]
        for name, found in held:
            if found:
                values[name] = {k: self._value(v) for k, v in found.items()}
        self.optim_values = values
        if manifest.param_groups is not None:
            self.param_groups = [self._value(group) for group in manifest.param_groups]
        self.extra = self._value(manifest.extra)
        own_states = manifest.own_states
        self.own_states = {k: self._value(v) for k, v in own_states.items()}

    def _value(self, value: Any) -> Any:
        return decode(value, self.path, self._loose)

    def _loose(self, index: int) -> Tensor:
        stored = self.manifest.loose[index]
        name = f"loose tensor {index}"
        return self._read(
            self._whole(stored, 0, stored.numel), stored.dtype, name
        ).view(stored.shape)

    def rng(self, rank: int, world_size: int) -> dict[str, Any] | None:
        """What the same rank saved, whatever the world size; None for ranks beyond."""
        states = self.manifest.rng
        return self._value(states[rank]) if rank < len(states) else None

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the flattened tensor; see ``Source``."""
        runs, dtype = self._model_runs(name, start, stop)
        return self._read(runs, dtype, shown(name))

    def check_model(self, name: str, start: int, stop: int) -> None:
        """Verify the blocks of it; see ``Source``."""
        self._check(self._model_runs(name, start, stop)[0], name, "", start, stop)

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of one state; see ``Source``."""
        runs, dtype = self._state_runs(name, state, start, stop)
        return self._read(runs, dtype, f"state {state!r} of {shown(name)}")

    def check_optim(self, name: str, state: str, start: int, stop: int) -> None:
        """Verify the blocks of it; see ``Source``."""
        runs, _ = self._state_runs(name, state, start, stop)
        self._check(runs, name, state, start, stop)

    def copy_model(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """Write elements ``[start, stop)`` into ``into``; see ``Source``."""
        runs, dtype = self._model_runs(name, start, stop)
        self._copy(runs, dtype, shown(name), into)

    def copy_optim(
        self, name: str, state: str, start: int, stop: int, into: Tensor
    ) -> None:
        """Write elements ``[start, stop)`` of one state; see ``Source``."""
        runs, dtype = self._state_runs(name, state, start, stop)
        self._copy(runs, dtype, f"state {state!r} of {shown(name)}", into)

    def __enter__(self) -> NativeSource:
        return self

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def _model_runs(
        self, name: str, start: int, stop: int
    ) -> tuple[list[_Run], torch.dtype]:
        _require_inside(name, self.model[name], start, stop)
        if name in self._wholes:
            stored = self._wholes[name]
            return self._whole(stored, start, stop), stored.dtype
        region, slot = self._slots[name]
        runs = _cut(region, slot, region.shards, region.dtype.itemsize, start, stop)
        return list(runs), region.dtype

    def _state_runs(
        self, name: str, state: str, start: int, stop: int
    ) -> tuple[list[_Run], torch.dtype]:
        _require_inside(name, self.optim[name][state], start, stop)
        owner, found = self._states[name, state]
        if found is None:
            return self._whole(owner, start, stop), owner.dtype
        kept, slot = found
        size = kept.dtype.itemsize
        return list(_cut(owner, slot, kept.shards, size, start, stop)), kept.dtype

    def _whole(self, stored: Stored, start: int, stop: int) -> list[_Run]:
        begin = stored.at.begin + start * stored.dtype.itemsize
        return [_Run(start, stop, stored.at.file, begin)]

    def _check(
        self, runs: list[_Run], name: str, state: str, start: int, stop: int
    ) -> None:
        info = self.optim[name][state] if state else self.model[name]
        for run in runs:
            end = run.begin + (run.stop - run.start) * info.dtype.itemsize
            wanted = (
                f"{f'state {state!r} of ' if state else ''}{shown(name)} "
                f"{_boxes(info.shape, start, stop)}"
            )
            self.files[run.file].check(run.begin, end, wanted)

    def _read(self, runs: list[_Run], dtype: torch.dtype, wanted: str) -> Tensor:
        # Checked before anything is allocated: a damaged manifest may claim any size.
        self._check_runs(runs, dtype, wanted)
        result = torch.empty(sum(run.stop - run.start for run in runs), dtype=dtype)
        self._fill(runs, result)
        return result

    def _copy(
        self, runs: list[_Run], dtype: torch.dtype, wanted: str, into: Tensor
    ) -> None:
        plain = into.device.type == "cpu" and into.is_contiguous()
        if not plain or into.dtype != dtype or into.is_conj() or into.is_neg():
            into.copy_(self._read(runs, dtype, wanted).view(into.shape))
            return
        self._check_runs(runs, dtype, wanted)
        self._fill(runs, into.detach().view(-1))
        if not into.is_inference():
            # What autograd has saved of it is not what it was.
            increment_version(into)

    def _check_runs(self, runs: list[_Run], dtype: torch.dtype, wanted: str) -> None:
        for run in runs:
            end = run.begin + (run.stop - run.start) * dtype.itemsize
            self.files[run.file].check(run.begin, end, wanted)

    def _fill(self, runs: list[_Run], result: Tensor) -> None:
        first = runs[0].start if runs else 0
        for run in runs:
            part = result[run.start - first : run.stop - first]
            self.files[run.file].read(part, run.begin)


def _require_inside(name: str, info: TensorInfo, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= info.numel:
        raise ValueError(
            f"elements [{start}, {stop}) were asked of {shown(name)}, which has "
            f"{info.numel}."
        )


def _cut(
    region: Region,
    slot: Slot,
    shards: tuple[Place, ...],
    itemsize: int,
    start: int,
    stop: int,
) -> Iterator[_Run]:
    """Where elements ``[start, stop)`` of a parameter lie, shard after shard."""
    size = region.shard_numel
    while start < stop:
        at = slot.offset + start
        shard, inner = divmod(at, size)
        count = min(stop - start, size - inner)
        place = shards[shard]
        yield _Run(start, start + count, place.file, place.begin + inner * itemsize)
        start += count


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> str:
    """The interval as rectangles, as messages print it."""
    boxes = interval_boxes(shape, start, stop)
    return ", ".join(f"[offsets {b.offsets} sizes {b.sizes}]" for b in boxes)


class _Blame:
    """Names the parameters, with boxes, that lie in some bytes of a file's payload."""

    def __init__(self, entries: list[Entry], manifest: Manifest) -> None:
        self.entries, self.manifest = entries, manifest

    def __call__(self, begin: int, end: int) -> str:
        found = []
        for entry in self.entries:
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
        yield f"{entry.what} {_boxes(entry.shape, start, stop)}"
        return
    base = entry.shard * region.shard_numel
    first = base + (low - entry.begin) // entry.itemsize
    last = base - (entry.begin - high) // entry.itemsize
    for i, slot in enumerate(region.slots):
        start = max(first - slot.offset, 0)
        stop = min(last - slot.offset, slot.numel)
        if start < stop and (state is None or i in state.slots):
            of = f"state {state.name!r} of " if state else ""
            yield f"{of}{shown(slot.fqns[0])} {_boxes(slot.shape, start, stop)}"
