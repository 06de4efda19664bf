"""Parses JSON into a manifest: every field present, of its type and range, no others.

No value of the document is trusted, and no memory is allocated by a size that the
document claims: the work is bounded by the length of the text. ``validate`` checks how
the fields fit together.
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
"""The largest size or offset: no real file is as large, and products stay cheap."""
_HEADER = 100_000_000
"""The largest header in bytes that the safetensors library reads."""
_CRC = 2**32 - 1
_MAX_DIMS = 64


def parse_fields(document: Json, file: str) -> Manifest:
    """Return the manifest in ``document``; ``file`` is the document's name in messages.

    Raises: CheckpointError, naming the file and the field.
    Collective: none.
    """
    return _Parser(file).manifest(document)


class _Parser:
    """The parser of a document; each method takes a value and its path in the document.

    Every method raises CheckpointError, naming the file and the path, for an unexpected
    value.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def bad(self, where: str, expected: str, got: object) -> CheckpointError:
        """Return the error for an unexpected value.

        Args:
            where: the path of the value.
            expected: words for the expected values.
            got: the value.
        """
        text = repr(got)
        # A damaged value may be of any length.
        text = text if len(text) <= 80 else f"{text[:80]}..."
        return CheckpointError(
            f"{self.file}: {where} is {text}, expected {expected}. The manifest is "
            "damaged or was edited; use another checkpoint."
        )

    def fields(self, value: Json, where: str, *names: str) -> list[Any]:
        """Return the values of an object's fields, which must be exactly ``names``."""
        # Unknown fields are refused, too: a reader that ignored a field could
        # misunderstand the other fields.
        if not isinstance(value, dict) or value.keys() != set(names):
            got = sorted(value) if isinstance(value, dict) else value
            raise self.bad(where, f"an object of {', '.join(names)}", got)
        return [value[name] for name in names]

    def integer(self, value: Json, where: str, most: int = LARGEST) -> int:
        """Return an integer from 0 to ``most``.

        Args:
            value: the JSON value.
            where: the path of the value.
            most: the largest integer allowed. Default ``LARGEST``.
        """
        # ``type`` and not ``isinstance``: a bool is an int in Python.
        if type(value) is not int or not 0 <= value <= most:
            raise self.bad(where, f"an integer from 0 to {most}", value)
        return value

    def text(self, value: Json, where: str) -> str:
        """Return a string."""
        if not isinstance(value, str):
            raise self.bad(where, "a string", value)
        return value

    def items(self, value: Json, where: str) -> list[Json]:
        """Return a list."""
        if not isinstance(value, list):
            raise self.bad(where, "a list", value)
        return value

    def mapping(self, value: Json, where: str) -> dict[str, Json]:
        """Return an object."""
        if not isinstance(value, dict):
            raise self.bad(where, "an object", value)
        return value

    def dtype(self, value: Json, where: str) -> torch.dtype:
        """Return a dtype, written by name."""
        # Only names of the table: never ``getattr`` of torch with a text from a file.
        known = DTYPES.get(value) if isinstance(value, str) else None
        if known is None:
            raise self.bad(where, "the name of a dtype", value)
        return known

    def integers(self, value: Json, where: str, most: int = LARGEST) -> tuple[int, ...]:
        """Return a tuple of integers from 0 to ``most``.

        Args:
            value: the JSON value.
            where: the path of the value.
            most: the largest integer allowed. Default ``LARGEST``.
        """
        items = self.items(value, where)
        return tuple(
            [self.integer(v, f"{where}[{i}]", most) for i, v in enumerate(items)]
        )

    def shape(self, value: Json, where: str) -> tuple[int, ...]:
        """Return the shape of a tensor, of at most ``_MAX_DIMS`` dimensions."""
        shape = self.integers(value, where)
        numel = 1
        for size in shape:
            numel *= size
            # Stop at the limit: the product of many large sizes takes very long to
            # compute.
            if numel > LARGEST:
                break
        if numel > LARGEST or len(shape) > _MAX_DIMS:
            raise self.bad(where, "a shape that fits into a file", value)
        return shape

    def fqns(self, value: Json, where: str) -> tuple[str, ...]:
        """Return the names of a parameter: at least one name, all different."""
        names = tuple([self.text(v, where) for v in self.items(value, where)])
        if not names or len(set(names)) != len(names):
            raise self.bad(where, "one or more different names", value)
        return names

    def place(self, value: Json, where: str) -> Place:
        """Return a place ``[file, begin]``."""
        found = self.integers(value, where)
        # ``validate`` checks that the file exists and the bytes lie in the file.
        if len(found) != 2:
            raise self.bad(where, "[file, begin]", value)
        return Place(*found)

    def places(self, value: Json, where: str) -> tuple[Place, ...]:
        """Return a tuple of places."""
        items = self.items(value, where)
        return tuple([self.place(v, f"{where}[{i}]") for i, v in enumerate(items)])

    def stored(self, value: Json, where: str) -> Stored:
        """Return a whole tensor."""
        dtype, shape, at = self.fields(value, where, "dtype", "shape", "at")
        return Stored(
            self.dtype(dtype, f"{where}.dtype"),
            self.shape(shape, f"{where}.shape"),
            self.place(at, f"{where}.at"),
        )

    def slot(self, value: Json, where: str) -> Slot:
        """Return a slot of a region."""
        names = ("fqns", "shape", "offset", "values")
        fqns, shape, offset, values = self.fields(value, where, *names)
        known = self.fqns(fqns, f"{where}.fqns")
        # Messages about the other fields name the parameter, not only the index.
        where = f"{where} ({known[0]!r})"
        return Slot(
            known,
            self.shape(shape, f"{where}.shape"),
            self.integer(offset, f"{where}.offset"),
            self.mapping(values, f"{where}.values"),
        )

    def state(self, value: Json, where: str) -> RegionState:
        """Return an optimizer state of a region."""
        names = ("name", "dtype", "slots", "shards")
        name, dtype, slots, shards = self.fields(value, where, *names)
        return RegionState(
            self.text(name, f"{where}.name"),
            self.dtype(dtype, f"{where}.dtype"),
            self.integers(slots, f"{where}.slots"),
            self.places(shards, f"{where}.shards"),
        )

    def region(self, value: Json, where: str) -> Region:
        """Return a region."""
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
        """Return a tensor that belongs to no unit."""
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
        """Return the facts about a file."""
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
        """Return the whole manifest."""
        self.version(value)
        facts = ("format", "version", "library", "torch", "world_size", "block_nbytes")
        parts = ("files", "regions", "singles", "loose", "param_groups", "extra")
        found = self.fields(value, "the manifest", *facts, *parts, "own_states", "rng")
        _, _, library, torch_version, world_size, block = found[:6]
        files, regions, singles, loose, groups, extra, own, rng = found[6:]
        # All readers use the constant, so another block size cannot be verified.
        if block != BLOCK or type(block) is not int:
            raise self.bad("block_nbytes", str(BLOCK), block)
        # None stands for a checkpoint without an optimizer.
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
            # Values of any form: ``validate`` decodes them.
            extra=extra,
            own_states=self.mapping(own, "own_states"),
            rng=tuple(self.items(rng, "rng")),
        )

    def each(self, value: Json, where: str, make: Any) -> tuple[Any, ...]:
        """Return a tuple of ``make(item, path)`` for the items of a list.

        Args:
            value: the JSON value.
            where: the path of the value.
            make: a method of this class.
        """
        items = self.items(value, where)
        return tuple([make(item, f"{where}[{i}]") for i, item in enumerate(items)])

    def version(self, value: Json) -> None:
        """Check format and version of the document."""
        # Before all other fields, because another version may have other fields.
        found = value.get("format") if isinstance(value, dict) else value
        # Any JSON file can lie at this path, for example an index of another program.
        if found != FORMAT:
            raise self.bad("format", repr(FORMAT), found)
        if type(value.get("version")) is not int or value["version"] != VERSION:
            raise CheckpointError(
                f"{self.file} is of format version {str(value.get('version'))[:80]}; "
                f"this version of composable_fsdp reads version {VERSION}. Read it "
                "with the release that wrote it, or a newer one."
            )
