"""What a checkpoint directory holds: frozen integers and names, to JSON and back.

::

    step-100/
      manifest.json              this
      rank00000.safetensors      header | payload: entries, end to end
      rank00001.safetensors

An entry is a tensor's bytes at a *place*, ``[file, begin]``: the file's index and the
first byte in its payload. A region has one entry per rank of its unit, shard ``r``
being elements ``[r * shard_numel, (r + 1) * shard_numel)`` of the flat buffer; so have
the optimizer's states of it. ``parse`` in ``validate`` is the way back from JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from composable_fsdp.storage.dtypes import dtype_name

FORMAT = "composable_fsdp.checkpoint"
VERSION = 1
BLOCK = 4 * 1024 * 1024
"""Payload bytes under one checksum."""

Json = Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry's bytes begin: which file, and the byte in its payload."""

    file: int
    begin: int

    def to_json(self) -> Json:
        """``[file, begin]``."""
        return [self.file, self.begin]


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor in one entry."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: Place

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def to_json(self) -> Json:
        """``{"dtype", "shape", "at"}``."""
        return {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "at": self.at.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's interval ``[offset, offset + numel)`` of its region.

    ``fqns`` are its names in the plain model, more than one if it is tied. ``values``
    is its optimizer state that is no tensor of its shape, encoded, by state name.
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    values: dict[str, Json]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def to_json(self) -> Json:
        """The fields by name."""
        return {
            "fqns": list(self.fqns),
            "shape": list(self.shape),
            "offset": self.offset,
            "values": self.values,
        }


@dataclass(frozen=True, slots=True)
class RegionState:
    """One optimizer state of a region: shards like the region's, in its own dtype.

    ``slots`` are the indices of the parameters that have it; elsewhere it is zero.
    """

    name: str
    dtype: torch.dtype
    slots: tuple[int, ...]
    shards: tuple[Place, ...]

    def to_json(self) -> Json:
        """The fields by name."""
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "slots": list(self.slots),
            "shards": [place.to_json() for place in self.shards],
        }


@dataclass(frozen=True, slots=True)
class Region:
    """One flat buffer of a unit, ``shards`` in the order of the unit's ranks."""

    unit: str
    dtype: torch.dtype
    shard_numel: int
    padded_numel: int
    slots: tuple[Slot, ...]
    shards: tuple[Place, ...]
    states: tuple[RegionState, ...]

    def to_json(self) -> Json:
        """The fields by name."""
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
    """A tensor of the model that no unit cuts: a buffer, or a parameter left whole."""

    fqns: tuple[str, ...]
    tensor: Stored
    states: dict[str, Stored]
    values: dict[str, Json]

    def to_json(self) -> Json:
        """The fields by name."""
        return {
            "fqns": list(self.fqns),
            "tensor": self.tensor.to_json(),
            "states": {name: state.to_json() for name, state in self.states.items()},
            "values": self.values,
        }


@dataclass(frozen=True, slots=True)
class File:
    """One rank's file: how it must look before its payload is read."""

    name: str
    header_nbytes: int
    """Where the payload begins: the header's length and the header."""
    header_crc32: int
    payload_nbytes: int
    blocks: tuple[int, ...]
    """crc32 of each ``BLOCK`` bytes of payload; the last one is shorter."""

    def to_json(self) -> Json:
        """The fields by name."""
        return {
            "name": self.name,
            "header_nbytes": self.header_nbytes,
            "header_crc32": self.header_crc32,
            "payload_nbytes": self.payload_nbytes,
            "blocks": list(self.blocks),
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint, without its tensors.

    ``loose`` are tensors that JSON values refer to by number: those of ``extra``, of
    the optimizer's values, and of ``rng``, which holds one dict per rank.
    """

    library: str
    torch: str
    world_size: int
    files: tuple[File, ...]
    regions: tuple[Region, ...]
    singles: tuple[Single, ...]
    loose: tuple[Stored, ...]
    param_groups: list[Json] | None
    extra: Json
    own_states: dict[str, Json]
    """What modules' ``get_extra_state`` gave, by its name in a state dict."""
    rng: tuple[Json, ...]

    def to_json(self) -> Json:
        """The manifest as ``json.dumps`` takes it; ``parse`` is its inverse."""
        return {
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
