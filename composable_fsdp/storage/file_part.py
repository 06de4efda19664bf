"""Describes the file of a rank for rank 0, which merges the files of all ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from composable_fsdp.storage.cuts import CutPart
from composable_fsdp.storage.local import LocalPart
from composable_fsdp.storage.manifest import Json, Slot

StateKey = tuple[str, str]
"""The name and the dtype of an optimizer state."""


@dataclass(slots=True)
class RegionPart:
    """This rank's part of a region; ``slots`` is None unless the rank describes them.

    ``shard`` is the number of this rank's shard, ``shards`` the number of shards. Where
    replicas write parts of a shard, each part counts as a shard.
    """

    unit: str
    index: int
    shard: int
    shards: int
    dtype: torch.dtype
    shard_numel: int
    first: str
    """The name of the first parameter, for messages."""
    key: str
    """The key of the shard's entry in the rank's file."""
    states: dict[StateKey, tuple[torch.dtype, tuple[int, ...], str]]
    """Per state: dtype, slots with elements and state on this rank, and entry key."""
    values: dict[int, dict[str, Json]] = field(default_factory=dict)
    """State that is not element-wise, by slot, where this rank writes the state."""
    shared: dict[int, dict[str, str]] = field(default_factory=dict)
    """The same as texts to compare, for slots that other ranks hold elements of."""
    slots: tuple[Slot, ...] | None = None


@dataclass(slots=True)
class SinglePart:
    """A tensor in no unit, with optimizer state; ``states`` maps names to keys."""

    names: tuple[str, ...]
    key: str
    number: int = 0
    """The place in the order of the tensors of all ranks that are saved once."""
    states: dict[str, str] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)


@dataclass(slots=True)
class FilePart:
    """The description of this rank's file for rank 0, without tensor values."""

    regions: list[RegionPart] = field(default_factory=list)
    singles: list[SinglePart] = field(default_factory=list)
    local: LocalPart = field(default_factory=LocalPart)
    cuts: list[CutPart] = field(default_factory=list)
    """Parameters of units whose other parameters are left out of the save."""
    wrappers: dict[str, str] = field(default_factory=dict)
    """The facts of tensors that wrap others, by name."""
    loose: list[str] = field(default_factory=list)
    """Keys of the entries that JSON values refer to by index in this list."""
    param_groups: list[Json] | None = None
    extra: Json = None
    group_numbers: list[int] = field(default_factory=list)
    """The number of each of ``param_groups`` in the optimizer."""
    experts: dict[int, list[str]] = field(default_factory=dict)
    """Names of experts of this rank by the number of their group."""
    own_states: dict[str, Json] = field(default_factory=dict)
    rng: Json = None
    per_rank: Json = None
    """The values of this rank alone; None if the caller has given none."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(
        default_factory=dict
    )
    """The dtype and shape of every entry, by key."""

    def kinds(self) -> Kinds:
        """Return the states that each region has on this rank."""
        return {
            (region.unit, region.index): {
                key: dtype for key, (dtype, _, _) in region.states.items()
            }
            for region in self.regions
        }


Kinds = dict[tuple[str, int], dict[StateKey, torch.dtype]]
"""(unit, index) of a region -> the states of the region, with dtypes."""


def digest(kinds: Kinds) -> str:
    """Return 16 characters that differ if ``kinds`` differ; empty without a region."""
    told = sorted((region, sorted(states)) for region, states in kinds.items())
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16] if told else ""
