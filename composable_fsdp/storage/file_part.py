"""Describes the file of a rank for rank 0, which merges the files of all ranks.

Values that each rank saves for itself: tensors in no unit that differ by design.

Experts of a rank, stages of a pipeline and norms of a rank have the same names on all
ranks, or names that other ranks lack. A save that is told so (``local=``) stores them
per rank::

    local[0]   experts.weight, its optimizer state and options    as rank 0 has them
    local[1]   experts.weight, ..                                 as rank 1 has them
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.cuts import CutPart
from composable_fsdp.storage.manifest import Json, Local, Manifest, Single, Slot


@dataclass(slots=True)
class LocalPart:
    """The values that this rank saves for itself; see ``Local``."""

    singles: list[Any] = field(default_factory=list)
    """A ``SinglePart`` for each tensor in no unit."""
    own_states: dict[str, Json] = field(default_factory=dict)
    values: dict[str, dict[str, Json]] = field(default_factory=dict)
    param_groups: list[Json] | None = None

    def is_empty(self) -> bool:
        """Return whether the rank has nothing of its own."""
        return not (self.singles or self.own_states or self.values or self.param_groups)


def merge_local(
    parts: Sequence[LocalPart],
    single: Callable[[int, Any], Single],
    shifted: Callable[[Json, int], Json],
) -> tuple[Local, ...]:
    """Return the own values of each rank; empty if no rank has any."""
    # Most checkpoints: a tuple per rank would only make the manifest longer.
    if all(part.is_empty() for part in parts):
        return ()
    return tuple(
        Local(
            tuple(single(rank, each) for each in part.singles),
            shifted(part.own_states, rank),
            shifted(part.values, rank),
            shifted(part.param_groups, rank),
        )
        for rank, part in enumerate(parts)
    )


class LocalNames:
    """The names of a checkpoint's manifest whose values belong to single ranks."""

    def __init__(self, manifest: Manifest) -> None:
        self._all = manifest.local
        tensors: set[str] = set()
        states: set[str] = set()
        for own in manifest.local:
            tensors.update(name for single in own.singles for name in single.fqns)
            tensors.update(own.own_states)
            groups = own.param_groups or ()
            states.update(own.values, *(group["params"] for group in groups))
        self.tensors = frozenset(tensors)
        """Names of tensors in no unit, and of extra states."""
        self.states = frozenset(states - tensors)
        """Names of parameters of units with values or options per rank."""

    def of_rank(self, rank: int | None) -> Local:
        """Return the values of ``rank``, and for units those of any rank.

        None stands for no rank: only values of units, from the first rank with them.
        """
        ranks = range(len(self._all))
        own = self._all[rank] if rank is not None and rank in ranks else None
        # A rank that had no elements of a parameter has no scalars of it.
        values: dict[str, dict[str, Json]] = {}
        for each in (own, *self._all):
            for name, found in each.values.items() if each is not None else ():
                values.setdefault(name, found)
        groups = list(own.param_groups or ()) if own is not None else self._shared()
        if own is None:
            return Local((), {}, values, groups)
        return Local(own.singles, own.own_states, values, groups)

    # Without a rank, an optimizer of sharded parameters must still have options.
    def _shared(self) -> list[Json]:
        """Return the options of parameters of units, as the first rank has them."""
        groups = (self._all[0].param_groups or ()) if self._all else ()
        kept = [
            {**group, "params": [n for n in group["params"] if n in self.states]}
            for group in groups
        ]
        return [group for group in kept if group["params"]]


def other_ranks_text(names: Sequence[str], saved: int, loading: int) -> str:
    """Return the difference of a load of single ranks' values at another world size."""
    return (
        f"{listed(map(quoted, names))} were saved per rank (local=) by {saved} ranks, "
        f"and {loading} load: pass load(.., local=[..]) with their names, if rank r is "
        "to get what rank r saved, and ranks beyond the saved ones are to keep their "
        "own"
    )


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
