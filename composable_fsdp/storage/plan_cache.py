"""Keeps the plan of a module's last save: places, shapes and names, merged once.

::

    first save    the part of each rank --> merge, validate, JSON     seconds, of many
    next saves    is my part as before? all say yes
                  --> checksums, scalars, extra, random states go into the plan kept

A rank compares its part with its last; no rank decides alone. The manifest is the same,
byte for byte, as that of a save that merges.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from composable_fsdp.storage.expert_names import with_experts
from composable_fsdp.storage.file_part import FilePart
from composable_fsdp.storage.manifest import File, Json, Manifest
from composable_fsdp.storage.merge import RankPart, merge, shifted
from composable_fsdp.storage.merged_plan import (
    Brief,
    MergedPlan,
    require_same_sizes,
)
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.validate import parse, require_changed


class PlanCache:
    """The plan of the last committed save of a module.

    ``token`` names the save on all ranks alike; empty, if there is none.
    """

    __slots__ = ("__weakref__", "_merged", "_part", "_ranks", "_token")

    def __init__(self) -> None:
        self._token = ""
        self._ranks: tuple[int, ...] = ()
        self._part: FilePart | None = None
        self._merged: MergedPlan | None = None

    def token_for(
        self, part: FilePart, ranks: tuple[int, ...], *, is_first: bool
    ) -> str:
        """Return the name of the last save, or "" if this save is not as that.

        Args:
            part: this rank's part.
            ranks: the ranks of the save.
            is_first: whether this is rank 0, which needs the merged plan.

        Collective: none.
        """
        # The process group may have been made anew over fewer ranks, and the part of a
        # plain module is the same there.
        if ranks != self._ranks or (is_first and self._merged is None):
            return ""
        # Compares names, shapes, places and options, and no value of a tensor.
        return self._token if part == self._part else ""

    def remember(self, token: str, part: FilePart, ranks: tuple[int, ...]) -> None:
        """Keep the part of this rank, of a save that all ranks know as committed.

        Args:
            token: the name of the save; "" while nobody knows.
            part: this rank's part.
            ranks: the ranks of the save.

        Collective: none.
        """
        self._token, self._part, self._ranks = token, part, ranks

    def keep(self, told: Sequence[RankPart], manifest: Manifest) -> None:
        """Keep the merged plan on rank 0."""
        self._merged = MergedPlan(told, manifest)

    def manifest(self, told: Sequence[Brief], block: int) -> Manifest:
        """Return the manifest of a save that differs from the last in ``told`` only.

        ``block`` are the bytes of payload that a checksum of this save covers.

        Raises: CheckpointError, for scalar state that differs between ranks.
        """
        merged = self._merged
        assert merged is not None
        merged.require_same_shared(told)
        require_same_sizes(merged.manifest, told)
        first = told[0]
        pairs = list(zip(told, merged.shifts, strict=True))
        per_rank: tuple[Json, ...] = ()
        if any(each.per_rank is not None for each in told):
            per_rank = tuple(
                {} if each.per_rank is None else shifted(each.per_rank, shift)
                for each, shift in pairs
            )
        return replace(
            merged.with_values(told),
            block_nbytes=block,
            files=tuple(each.file for each in told),
            rng=tuple(shifted(each.rng, shift) for each, shift in pairs),
            per_rank=per_rank,
            extra=first.extra,
            own_states=first.own_states,
            param_groups=with_experts(
                first.param_groups, merged.numbers, merged.experts
            ),
            metric=first.metric,
        )

    def texts(self, manifest: Manifest) -> dict[str, str]:
        """Return JSON of fields of ``manifest``, a result of the method of the name."""
        assert self._merged is not None
        return self._merged.texts(manifest)


# Beside the modules and not in them: a deep copy of a module has no save before it.
_caches: weakref.WeakKeyDictionary[nn.Module, PlanCache] = weakref.WeakKeyDictionary()
"""The plan of each module that was saved."""


@dataclass(slots=True)
class Reuse:
    """The use that a save makes of the last save's plan.

    ``part`` is this rank's, before entries are added that other ranks ask for;
    ``is_same`` tells whether the parts of all ``ranks`` are as in the last save.
    """

    plan: PlanCache
    part: FilePart
    ranks: tuple[int, ...]
    is_same: bool

    def begin(self) -> None:
        """Let the next save merge, unless this save is committed on all ranks."""
        # Ranks may learn of a failure in different ways; then they would not agree
        # which save was the last.
        self.plan.remember("", self.part, self.ranks)

    def told(
        self, part: FilePart, file: File, begins: dict[str, int]
    ) -> RankPart | Brief:
        """Return the description of this rank's file for rank 0.

        Args:
            part: the part, complete.
            file: the file that was written.
            begins: the first payload byte of each entry.
        """
        return Brief.of(part, file) if self.is_same else (part, file, begins)

    def manifest(
        self, told: Sequence[Any], block: int, file: str
    ) -> tuple[Manifest, bytes]:
        """Return the manifest and the content of its file, on rank 0.

        Args:
            told: the results of ``told`` of all ranks.
            block: the bytes of payload that a checksum covers.
            file: the name of the manifest in messages.

        Raises: CheckpointError, for parts that do not fit together, or a manifest that
        no load would take: such a checkpoint is not committed.
        Collective: none.
        """
        # Rank 0 alone works here, and all others wait for the commit.
        if self.is_same:
            manifest = self.plan.manifest(told, block)
            require_changed(manifest, file)
            return manifest, manifest_bytes(manifest, self.plan.texts(manifest))
        manifest = merge(told, block)
        # As a load would: an unreadable checkpoint is not committed.
        parse(manifest.to_json(), file)
        self.plan.keep(told, manifest)
        return manifest, manifest_bytes(manifest, self.plan.texts(manifest))

    def end(self, token: str) -> None:
        """Keep the plan; all ranks know that the save ``token`` was committed."""
        self.plan.remember(token, self.part, self.ranks)


def plan_cache_of(module: Any) -> PlanCache:
    """Return the plan of the last save of ``module``; an empty one at the first.

    Collective: none.
    """
    # The error for an object of another type comes later, on all ranks.
    if not isinstance(module, nn.Module):
        return PlanCache()
    return _caches.setdefault(module, PlanCache())
