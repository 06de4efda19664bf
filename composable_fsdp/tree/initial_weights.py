"""Hashes of the values that a rank passed to ``fully_shard``.

A rank keeps only its own rows, so ``fully_shard`` hashes whole values. Before the first
gather ``guard.same_weights`` compares the hashes of parameters not written to since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from torch import Tensor, nn

from composable_fsdp.flat.handle import UnitLayout
from composable_fsdp.planning.layout import RegionLayout

T = TypeVar("T")

_version = attrgetter("_version")

NOBODY, SHARD_RANKS, ALL_RANKS = range(3)
"""Values of ``InitialWeights.compared``: nobody yet, the ranks of the shard groups, or
the replicas, too."""


@dataclass(slots=True, eq=False)
class InitialWeights:
    """A record of the values that ``fully_shard`` was given."""

    is_checked: bool
    """Whether ranks compare the values of the unit. False with
    ``check_weights="off"``, and if there is no other rank."""
    hashes: Tensor | None
    """The hash of each parameter, by slot index. None for values that were broadcast or
    are on meta, and for a unit that is not cut."""
    synced: bool
    """Whether the initial values were broadcast."""
    # Two tuples of integers: the garbage collector would visit each pair.
    _ids: tuple[int, ...] = ()
    _versions: tuple[int, ...] = ()
    compared: int = NOBODY
    """On the outermost unit of a tree: with which ranks the tree was compared."""
    awaits_buffers: bool = False
    """Whether buffers of the unit were on meta and may still have no values."""
    drawn: dict[int, int] = field(default_factory=dict)
    """By slot index: the start of random numbers that were drawn into a shard."""
    was_on_meta: bool = False
    """Whether shards of the model were on meta on any rank; known from the first
    gather."""

    def mark(self, layout: UnitLayout) -> None:
        """Remember that the sharded parameters hold the initial values."""
        if not self.is_checked:
            return
        leaves = sharded_leaves(layout)
        self._ids = tuple(map(id, leaves))
        self._versions = tuple(map(_version, leaves))

    def forget(self) -> None:
        """Remember that the values have been replaced since."""
        self._versions = (-1,) * len(self._versions)

    def unwritten(self, layout: UnitLayout) -> list[bool]:
        """Return, by slot index, whether a parameter holds its initial value."""
        leaves = sharded_leaves(layout)
        if not self._ids:  # made on meta
            return [False] * len(leaves)
        # The usual case: no parameter was written to or replaced.
        versions = tuple(map(_version, leaves))
        if versions == self._versions and tuple(map(id, leaves)) == self._ids:
            return [True] * len(leaves)
        return [
            id(leaf) == known and now == version
            for leaf, known, now, version in zip(
                leaves, self._ids, versions, self._versions, strict=True
            )
        ]

    def copy(self, layout: UnitLayout, copied: UnitLayout) -> InitialWeights:
        """Return what a copy of the unit remembers; ``copied`` is the copy's layout."""
        made = InitialWeights(
            is_checked=self.is_checked, hashes=self.hashes, synced=self.synced
        )
        made.awaits_buffers = self.awaits_buffers
        # The copied tensors have versions of their own; none has the version -1.
        made.mark(copied)
        now, kept = made._versions, self.unwritten(layout)  # ``now`` may be empty
        made._versions = tuple(
            [v if same else -1 for v, same in zip(now, kept, strict=False)]
        )
        return made


def sharded_leaves(layout: UnitLayout) -> list[nn.Parameter]:
    """Return the sharded parameters of a unit, in the order of the slots."""
    return in_slot_order(layout.plan.regions, [r.leaves for r in layout.regions])


def in_slot_order(
    regions: tuple[RegionLayout, ...], found: Sequence[Sequence[T]]
) -> list[T]:
    """Return the values ``found`` of each region, in the order of the slots."""
    if len(regions) == 1:
        # Without a copy: units are hashed, marked and compared one by one at set-up.
        slots, values = regions[0].indices, found[0]
    else:
        slots = tuple(chain.from_iterable([region.indices for region in regions]))
        values = list(chain.from_iterable(found))
    return [values[place] for place in _places(slots)]


@lru_cache(maxsize=64)
def _places(slots: tuple[int, ...]) -> list[int]:
    """Return where each slot is in ``slots``. Most units are alike."""
    return sorted(range(len(slots)), key=slots.__getitem__)
