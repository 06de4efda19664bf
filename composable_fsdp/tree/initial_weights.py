"""Hashes of the values that a rank passed to ``fully_shard``.

``fully_shard`` hashes whole values, because a rank keeps only its own rows afterwards.
Before the first gather ``tree.same_weights`` compares the hashes with those of other
ranks. If a parameter was written to in the meantime, for example by a checkpoint that
was loaded, its hash is not valid any more::

    fully_shard       hash_weights     whole values -> hashes
                      mark             which parameters hold these values
    first gather      valid_hashes     hashes of parameters that were not written to
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.flat.handle import UnitLayout
from composable_fsdp.flat.value_hash import has_values, hash_values
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.planner import Target

T = TypeVar("T")

NOBODY, SHARD_RANKS, ALL_RANKS = range(3)
"""Values of ``InitialWeights.compared``: nobody yet, the ranks of the shard groups, or
the replicas, too."""


class InitialWeights:
    """What a unit remembers of the values that ``fully_shard`` was given."""

    __slots__ = ("_ids", "_versions", "compared", "hashes", "is_checked", "synced")

    def __init__(
        self, *, is_checked: bool, hashes: Tensor | None, synced: bool
    ) -> None:
        self.is_checked = is_checked
        """Whether ranks compare the values of the unit. False with
        ``check_weights="off"``, and if there is no other rank."""
        self.hashes = hashes
        """The hash of each parameter, by slot index. None after a broadcast, which made
        the values equal, for values on meta, and for a unit that is not cut."""
        self.synced = synced
        """Whether the initial values were broadcast."""
        # Two tuples of integers instead of a tuple of pairs, because the garbage
        # collector visits each pair.
        self._ids: tuple[int, ...] = ()
        self._versions: tuple[int, ...] = ()
        self.compared = NOBODY
        """On the outermost unit of a tree: with which ranks the tree was compared."""

    def mark(self, layout: UnitLayout) -> None:
        """Remember that the sharded parameters hold the initial values."""
        leaves = sharded_leaves(layout)
        self._ids = tuple(map(id, leaves))
        self._versions = tuple([leaf._version for leaf in leaves])

    def forget(self) -> None:
        """Remember that the values have been replaced since."""
        self._versions = (-1,) * len(self._versions)

    def refresh(self, layout: UnitLayout) -> None:
        """Hash the values as they are now, if the unit is not cut.

        Such a unit has whole values at any time, so no write is overlooked. Nothing is
        hashed if the values were broadcast and not written to.
        """
        leaves = sharded_leaves(layout)
        if not self.is_checked or not all(map(has_values, leaves)):
            return
        if not (self.synced and all(self.unwritten(layout))):
            self.hashes = hash_values(leaves)
            self.mark(layout)

    def unwritten(self, layout: UnitLayout) -> list[bool]:
        """Return, by slot index, whether a parameter holds its initial value."""
        leaves = sharded_leaves(layout)
        if not self._ids:  # made on meta
            return [False] * len(leaves)
        return [
            id(leaf) == known and leaf._version == version
            for leaf, known, version in zip(
                leaves, self._ids, self._versions, strict=True
            )
        ]

    def copy(self, layout: UnitLayout, copied: UnitLayout) -> InitialWeights:
        """Return what a copy of the unit remembers; ``copied`` is the copy's layout."""
        made = InitialWeights(
            is_checked=self.is_checked, hashes=self.hashes, synced=self.synced
        )
        made.mark(copied)
        # The copied tensors have versions of their own, so a parameter that was written
        # to needs a version that no tensor has.
        if self._ids:
            made._versions = tuple(
                [
                    version if is_unwritten else -1
                    for version, is_unwritten in zip(
                        made._versions, self.unwritten(layout), strict=True
                    )
                ]
            )
        else:
            made._ids = ()
        return made


def hash_weights(target: Target, groups: Groups, *, synced: bool) -> InitialWeights:
    """Hash the whole values of a unit, before the unit is sharded.

    Args:
        target: the planned unit.
        groups: the process groups of the unit.
        synced: whether the values were broadcast just now.

    Returns: the hashes; call ``mark`` after the unit was sharded.
    Collective: none.
    """
    is_checked = target.plan.options.check_weights != "off" and groups.has_peers
    hashes = None
    # Without other ranks nothing is hashed: tensors may be fake then.
    if is_checked and not synced and groups.shard is not None:
        values: list[nn.Parameter] = by_slot(target.plan.regions, target.parameters)
        if all(map(has_values, values)):
            hashes = hash_values(values)
    return InitialWeights(is_checked=is_checked, hashes=hashes, synced=synced)


def by_slot(regions: Iterable[RegionLayout], found: Iterable[Sequence[T]]) -> list[T]:
    """Return what ``found`` has per region and parameter, in the order of the slots."""
    # Regions hold parameters by dtype and size; slots count in the module's order.
    pairs = [
        (slot.index, each)
        for region, values in zip(regions, found, strict=True)
        for slot, each in zip(region.parameters, values, strict=True)
    ]
    return [each for _, each in sorted(pairs, key=lambda pair: pair[0])]


def sharded_leaves(layout: UnitLayout) -> list[nn.Parameter]:
    """Return the sharded parameters of a unit, in the order of the slots."""
    return by_slot(
        [region.layout for region in layout.regions],
        [region.leaves for region in layout.regions],
    )
