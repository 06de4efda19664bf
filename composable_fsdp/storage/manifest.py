"""The manifest of a checkpoint directory: frozen integers and names, to and from JSON.

::

    step-100/
      manifest.json              this
      rank00000.safetensors      header | payload: entries, end to end
      rank00001.safetensors

An entry holds the bytes of a tensor, or of a shard. A *place* ``[file, begin]`` says
where an entry begins: the index of the file, and the first byte in the payload of that
file. A region has an entry per rank of the unit: shard ``r`` holds the elements ``[r *
shard_numel, (r + 1) * shard_numel)`` of the flat buffer. Each optimizer state of a
region is stored in the same way. ``parse`` in ``validate`` is the inverse of
``to_json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from composable_fsdp.storage.dtypes import dtype_name

FORMAT = "composable_fsdp.checkpoint"
# A reader refuses another version, because fields may have another meaning there.
VERSION = 1
# To verify a slice, a reader reads whole blocks: larger blocks cost more for small
# slices, and smaller blocks make a larger manifest.
BLOCK = 4 * 1024 * 1024
"""Bytes of payload that a single checksum covers."""

Json = Any


@dataclass(frozen=True, slots=True)
class Place:
    """The beginning of an entry: the file's index, and a byte in the file's payload."""

    file: int
    begin: int

    def to_json(self) -> Json:
        """Return ``[file, begin]``."""
        return [self.file, self.begin]


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor, stored in a single entry at the place ``at``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: Place

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def to_json(self) -> Json:
        """Return ``{"dtype", "shape", "at"}``."""
        return {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "at": self.at.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's interval ``[offset, offset + numel)`` of the region, in elements.

    ``fqns`` are the parameter's names in the plain model; a tied parameter has several.
    ``values`` holds, by state name and encoded, the optimizer state that is not
    element-wise (not a tensor of the parameter's shape).
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    values: dict[str, Json]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def to_json(self) -> Json:
        """Return the fields by name."""
        return {
            "fqns": list(self.fqns),
            "shape": list(self.shape),
            "offset": self.offset,
            "values": self.values,
        }


@dataclass(frozen=True, slots=True)
class RegionState:
    """An optimizer state of a region, cut into shards as the region.

    ``dtype`` may differ from the region's dtype. ``slots`` are the indices of the
    parameters that have the state. The elements of all other parameters are stored as
    zeros.
    """

    name: str
    dtype: torch.dtype
    slots: tuple[int, ...]
    shards: tuple[Place, ...]

    def to_json(self) -> Json:
        """Return the fields by name."""
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "slots": list(self.slots),
            "shards": [place.to_json() for place in self.shards],
        }


@dataclass(frozen=True, slots=True)
class Region:
    """A flat buffer of a unit, with ``shards`` in the order of the unit's ranks."""

    unit: str
    dtype: torch.dtype
    shard_numel: int
    # Elements of the flat buffer, padding included: ``shard_numel * len(shards)``.
    padded_numel: int
    slots: tuple[Slot, ...]
    shards: tuple[Place, ...]
    states: tuple[RegionState, ...]

    def to_json(self) -> Json:
        """Return the fields by name."""
        return {
            "unit": self.unit,
            "dtype": dtype_name(self.dtype),
            "shard_numel": self.shard_numel,
            "padded_numel": self.padded_numel,
            "slots": [slot.to_json() for slot in self.slots],
            "shards": [place.to_json() for place in self.shards],
            "states": [state.to_json() for state in self.states],
        }


@dataclass(frozen=True, slots=True)
class Single:
    """A tensor of the model in no unit: a buffer, or a parameter that is not sharded.

    ``states`` are optimizer states that are tensors, ``values`` all others (encoded),
    both by state name.
    """

    fqns: tuple[str, ...]
    tensor: Stored
    states: dict[str, Stored]
    values: dict[str, Json]

    def to_json(self) -> Json:
        """Return the fields by name."""
        return {
            "fqns": list(self.fqns),
            "tensor": self.tensor.to_json(),
            "states": {name: state.to_json() for name, state in self.states.items()},
            "values": self.values,
        }


@dataclass(frozen=True, slots=True)
class File:
    """The file of a rank: sizes and checksums to verify before reading the payload."""

    name: str
    header_nbytes: int
    """The byte at which the payload begins: 8 bytes of header length and the header."""
    # The header repeats facts of the manifest for other readers of safetensors; the
    # checksum shows that both describe the same file.
    header_crc32: int
    payload_nbytes: int
    blocks: tuple[int, ...]
    """The crc32 of each ``BLOCK`` bytes of payload; the last block may be shorter."""

    def to_json(self) -> Json:
        """Return the fields by name."""
        return {
            "name": self.name,
            "header_nbytes": self.header_nbytes,
            "header_crc32": self.header_crc32,
            "payload_nbytes": self.payload_nbytes,
            "blocks": list(self.blocks),
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint without the values of tensors.

    ``loose`` are tensors that JSON values refer to by index: the tensors in ``extra``,
    in the modules' extra states, in the optimizer's values and options, and in ``rng``.
    ``rng`` holds a dict per rank.
    """

    # The versions that wrote the checkpoint; no code depends on them.
    library: str
    torch: str
    world_size: int
    files: tuple[File, ...]
    regions: tuple[Region, ...]
    singles: tuple[Single, ...]
    loose: tuple[Stored, ...]
    # None: the checkpoint was saved without an optimizer.
    param_groups: list[Json] | None
    extra: Json
    own_states: dict[str, Json]
    """Results of modules' ``get_extra_state``, by the name in a state dict."""
    # Empty in a converted checkpoint.
    rng: tuple[Json, ...]

    def to_json(self) -> Json:
        """Return the manifest for ``json.dumps``; ``parse`` is the inverse."""
        return {
            # A reader must refuse unknown keys, so a new key needs a new
            # VERSION.
            "format": FORMAT,
            "version": VERSION,
            "library": self.library,
            "torch": self.torch,
            "world_size": self.world_size,
            "block_nbytes": BLOCK,
            "files": [file.to_json() for file in self.files],
            "regions": [region.to_json() for region in self.regions],
            "singles": [single.to_json() for single in self.singles],
            "loose": [stored.to_json() for stored in self.loose],
            "param_groups": self.param_groups,
            "extra": self.extra,
            "own_states": self.own_states,
            "rng": list(self.rng),
        }
