"""From JSON to a manifest: every field there, of its type and in its range, none else.

Nothing is trusted and nothing is allocated by a claimed size: the work is bounded by
the size of the text. What the fields mean together is checked by ``validate``.
"""

from __future__ import annotations

from typing import Any

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.dtypes import DTYPES
from composable_fsdp.storage.manifest import (
    BLOCK,
    FORMAT,
    VERSION,
    File,
    Json,
    Manifest,
    Place,
    Region,
    RegionState,
    Single,
    Slot,
    Stored,
)

LARGEST = 2**62
"""No size or offset of a real file reaches it, and products of two stay cheap."""
_HEADER = 100_000_000
"""The safetensors library reads no larger one."""
_CRC = 2**32 - 1
_MAX_DIMS = 64


def parse_fields(document: Json, file: str) -> Manifest:
    """The manifest in ``document``; ``file`` is how messages call where it came from.

    Raises: CheckpointError, naming the file and the field.
    """
    return _Parser(file).manifest(document)


class _Parser:
    """One document; every method takes a value and where it stands."""

    def __init__(self, file: str) -> None:
        self.file = file

    def bad(self, where: str, expected: str, got: object) -> CheckpointError:
        text = repr(got)
        text = text if len(text) <= 80 else f"{text[:80]}..."
        return CheckpointError(
            f"{self.file}: {where} is {text}, expected {expected}. The manifest is "
            "damaged or was edited; use another checkpoint."
        )

    def fields(self, value: Json, where: str, *names: str) -> list[Any]:
        if not isinstance(value, dict) or value.keys() != set(names):
            got = sorted(value) if isinstance(value, dict) else value
            raise self.bad(where, f"an object of {', '.join(names)}", got)
        return [value[name] for name in names]

    def integer(self, value: Json, where: str, most: int = LARGEST) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise self.bad(where, f"an integer from 0 to {most}", value)
        return value

    def text(self, value: Json, where: str) -> str:
        if not isinstance(value, str):
            raise self.bad(where, "a string", value)
        return value

    def items(self, value: Json, where: str) -> list[Json]:
        if not isinstance(value, list):
            raise self.bad(where, "a list", value)
        return value

    def mapping(self, value: Json, where: str) -> dict[str, Json]:
        if not isinstance(value, dict):
            raise self.bad(where, "an object", value)
        return value

    def dtype(self, value: Json, where: str) -> torch.dtype:
        known = DTYPES.get(value) if isinstance(value, str) else None
        if known is None:
            raise self.bad(where, "the name of a dtype", value)
        return known

    def integers(self, value: Json, where: str, most: int = LARGEST) -> tuple[int, ...]:
        items = self.items(value, where)
        return tuple(
            [self.integer(v, f"{where}[{i}]", most) for i, v in enumerate(items)]
        )

    def shape(self, value: Json, where: str) -> tuple[int, ...]:
        shape = self.integers(value, where)
        numel = 1
        for size in shape:
            numel *= size
            if numel > LARGEST:
                break
        if numel > LARGEST or len(shape) > _MAX_DIMS:
            raise self.bad(where, "a shape that fits into a file", value)
        return shape

    def fqns(self, value: Json, where: str) -> tuple[str, ...]:
        names = tuple([self.text(v, where) for v in self.items(value, where)])
        if not names or len(set(names)) != len(names):
            raise self.bad(where, "one or more different names", value)
        return names

    def place(self, value: Json, where: str) -> Place:
        found = self.integers(value, where)
        if len(found) != 2:
            raise self.bad(where, "[file, begin]", value)
        return Place(*found)

    def places(self, value: Json, where: str) -> tuple[Place, ...]:
        items = self.items(value, where)
        return tuple([self.place(v, f"{where}[{i}]") for i, v in enumerate(items)])

    def stored(self, value: Json, where: str) -> Stored:
        dtype, shape, at = self.fields(value, where, "dtype", "shape", "at")
        return Stored(
            self.dtype(dtype, f"{where}.dtype"),
            self.shape(shape, f"{where}.shape"),
            self.place(at, f"{where}.at"),
        )

    def slot(self, value: Json, where: str) -> Slot:
        names = ("fqns", "shape", "offset", "values")
        fqns, shape, offset, values = self.fields(value, where, *names)
        known = self.fqns(fqns, f"{where}.fqns")
        where = f"{where} ({known[0]!r})"
        return Slot(
            known,
            self.shape(shape, f"{where}.shape"),
            self.integer(offset, f"{where}.offset"),
            self.mapping(values, f"{where}.values"),
        )

    def state(self, value: Json, where: str) -> RegionState:
        names = ("name", "dtype", "slots", "shards")
        name, dtype, slots, shards = self.fields(value, where, *names)
        return RegionState(
            self.text(name, f"{where}.name"),
            self.dtype(dtype, f"{where}.dtype"),
            self.integers(slots, f"{where}.slots"),
            self.places(shards, f"{where}.shards"),
        )

    def region(self, value: Json, where: str) -> Region:
        names = ("unit", "dtype", "shard_numel", "padded_numel")
        unit, dtype, shard_numel, padded_numel, slots, shards, states = self.fields(
            value, where, *names, "slots", "shards", "states"
        )
        where = f"{where} (unit {unit!r})"
        parts = self.items(slots, f"{where}.slots")
        kinds = self.items(states, f"{where}.states")
        return Region(
            self.text(unit, f"{where}.unit"),
            self.dtype(dtype, f"{where}.dtype"),
            self.integer(shard_numel, f"{where}.shard_numel"),
            self.integer(padded_numel, f"{where}.padded_numel"),
            tuple([self.slot(v, f"{where}.slots[{i}]") for i, v in enumerate(parts)]),
            self.places(shards, f"{where}.shards"),
            tuple([self.state(v, f"{where}.states[{i}]") for i, v in enumerate(kinds)]),
        )

    def single(self, value: Json, where: str) -> Single:
        names = ("fqns", "tensor", "states", "values")
        fqns, tensor, states, values = self.fields(value, where, *names)
        known = self.fqns(fqns, f"{where}.fqns")
        where = f"{where} ({known[0]!r})"
        kinds = self.mapping(states, f"{where}.states")
        return Single(
            known,
            self.stored(tensor, f"{where}.tensor"),
            {k: self.stored(v, f"{where}.states[{k!r}]") for k, v in kinds.items()},
            self.mapping(values, f"{where}.values"),
        )

    def stored_file(self, value: Json, where: str) -> File:
        names = ("name", "header_nbytes", "header_crc32", "payload_nbytes", "blocks")
        name, header, crc, payload, blocks = self.fields(value, where, *names)
        return File(
            self.text(name, f"{where}.name"),
            self.integer(header, f"{where}.header_nbytes", _HEADER),
            self.integer(crc, f"{where}.header_crc32", _CRC),
            self.integer(payload, f"{where}.payload_nbytes"),
            self.integers(blocks, f"{where}.blocks", _CRC),
        )

    def manifest(self, value: Json) -> Manifest:
        self.version(value)
        facts = ("format", "version", "library", "torch", "world_size", "block_nbytes")
        parts = ("files", "regions", "singles", "loose", "param_groups", "extra")
        found = self.fields(value, "the manifest", *facts, *parts, "own_states", "rng")
        _, _, library, torch_version, world_size, block = found[:6]
        files, regions, singles, loose, groups, extra, own, rng = found[6:]
        if block != BLOCK or type(block) is not int:
            raise self.bad("block_nbytes", str(BLOCK), block)
        if groups is not None:
            self.items(groups, "param_groups")
        return Manifest(
            library=self.text(library, "library"),
            torch=self.text(torch_version, "torch"),
            world_size=self.integer(world_size, "world_size"),
            files=self.each(files, "files", self.stored_file),
            regions=self.each(regions, "regions", self.region),
            singles=self.each(singles, "singles", self.single),
            loose=self.each(loose, "loose", self.stored),
            param_groups=groups,
            extra=extra,
            own_states=self.mapping(own, "own_states"),
            rng=tuple(self.items(rng, "rng")),
        )

    def each(self, value: Json, where: str, make: Any) -> tuple[Any, ...]:
        items = self.items(value, where)
        return tuple([make(item, f"{where}[{i}]") for i, item in enumerate(items)])

    def version(self, value: Json) -> None:
        """First, because another version may have other fields."""
        found = value.get("format") if isinstance(value, dict) else value
        if found != FORMAT:
            raise self.bad("format", repr(FORMAT), found)
        if type(value.get("version")) is not int or value["version"] != VERSION:
            raise CheckpointError(
                f"{self.file} is of format version {str(value.get('version'))[:80]}; "
                f"this version of composable_fsdp reads version {VERSION}. Read it "
                "with the release that wrote it, or a newer one."
            )
