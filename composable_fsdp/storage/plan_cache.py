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
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.expert_names import with_experts
from composable_fsdp.storage.file_part import FilePart
from composable_fsdp.storage.manifest import (
    File,
    Json,
    Manifest,
    Region,
    SavedMetric,
    Slot,
    fields_text,
    text_of_value,
)
from composable_fsdp.storage.merge import (
    RankPart,
    loose_shifts,
    merge,
    require_same_values,
    shifted,
    single_parts,
)
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.validate import parse, require_changed

_CONSTANT = ("cuts", "grids", "local", "loose")
"""The fields of a manifest that follow from the parts alone."""
_CONSTANT_OF_REGION = ("shards", "states")
"""The fields of a region with a place for each rank."""


@dataclass(frozen=True, slots=True)
class Brief:
    """The values of a rank that change from save to save although its part does not."""

    file: File
    shared: list[dict[int, dict[str, str]]]
    """Per region part, ``RegionPart.shared``."""
    texts: frozenset[tuple[str, str]]
    """The names of states in ``shared``, with their different texts."""
    values: list[dict[int, dict[str, Json]]]
    """Per region part, ``RegionPart.values``."""
    singles: list[dict[str, Json]]
    """Per tensor in no unit, ``SinglePart.values``."""
    rng: Json
    per_rank: Json
    extra: Json
    own_states: dict[str, Json]
    param_groups: list[Json] | None
    metric: SavedMetric | None

    @staticmethod
    def of(part: FilePart, file: File) -> Brief:
        """Return the brief of a part that is as in the last save, and of its file."""
        texts: dict[str, str] = {}
        # Equal texts as a single object, which is sent once: parameters mostly have the
        # same number of steps.
        shared = [
            {
                i: {name: texts.setdefault(text, text) for name, text in each.items()}
                for i, each in region.shared.items()
            }
            for region in part.regions
        ]
        return Brief(
            file,
            shared,
            frozenset(
                item
                for region in shared
                for each in region.values()
                for item in each.items()
            ),
            [region.values for region in part.regions],
            [single.values for single in part.singles],
            part.rng,
            part.per_rank,
            part.extra,
            part.own_states,
            part.param_groups,
            part.metric,
        )


class _Merged:
    """The merged plan, on rank 0."""

    __slots__ = (
        "_texts",
        "experts",
        "keys",
        "manifest",
        "numbers",
        "shifts",
        "singles",
    )

    def __init__(self, told: Sequence[RankPart], manifest: Manifest) -> None:
        self.manifest = manifest
        # Loose tensors are of the plan, too: ``extra`` with another number of tensors
        # is another part, and moves the numbers of all later ranks.
        self.shifts = loose_shifts(told)
        self.keys = [
            [(region.unit, region.index) for region in part.regions]
            for part, _, _ in told
        ]
        """Per rank, the regions of its part."""
        self.singles = [
            (rank, told[rank][0].singles.index(single))
            for rank, single in single_parts(told)
        ]
        """Per tensor in no unit, the rank that wrote it and the number there."""
        self.numbers = told[0][0].group_numbers
        """The number of each group of options of rank 0 in the optimizer."""
        self.experts = [part.experts for part, _, _ in told]
        """Per rank, the experts by the number of their group."""
        self._texts: tuple[dict[str, str], list[dict[str, str]]] | None = None
        """The constant fields as JSON: of the manifest, and of each region."""

    def with_values(self, told: Sequence[Brief]) -> Manifest:
        """Return the manifest with the scalar states of ``told``."""
        values: dict[tuple[str, int], dict[int, dict[str, Json]]] = {}
        # A single rank tells the state of a parameter, so the order does not matter.
        for rank, (brief, keys) in enumerate(zip(told, self.keys, strict=True)):
            for key, each in zip(keys, brief.values, strict=True):
                for i, found in each.items():
                    moved = shifted(found, self.shifts[rank])
                    values.setdefault(key, {})[i] = moved
        # The order in which ``merge`` meets the regions.
        order = dict.fromkeys(key for keys in self.keys for key in keys)
        regions = [
            replace(region, slots=_with_values(region.slots, values.get(key, {})))
            for key, region in zip(order, self.manifest.regions, strict=True)
        ]
        singles = [
            replace(
                single, values=shifted(told[rank].singles[number], self.shifts[rank])
            )
            for (rank, number), single in zip(
                self.singles, self.manifest.singles, strict=True
            )
        ]
        return replace(self.manifest, regions=tuple(regions), singles=tuple(singles))

    def texts(self, manifest: Manifest) -> dict[str, str]:
        """Return JSON of fields of ``manifest``, of constant texts and new values."""
        # Made once, by the save that merges, which writes them at once.
        if self._texts is None:
            self._texts = (
                {name: text_of_value(getattr(manifest, name)) for name in _CONSTANT},
                [
                    {n: text_of_value(getattr(each, n)) for n in _CONSTANT_OF_REGION}
                    for each in manifest.regions
                ],
            )
        constant, of_regions = self._texts
        # The places of shards are most of a manifest: one per rank, region and state.
        names = [each.name for each in fields(Region)]
        regions = [
            fields_text(region, names, known)
            for region, known in zip(manifest.regions, of_regions, strict=True)
        ]
        return {**constant, "regions": f"[{','.join(regions)}]"}


def _with_values(
    slots: Sequence[Slot], values: dict[int, dict[str, Json]]
) -> tuple[Slot, ...]:
    """Return the slots with other scalar states."""
    return tuple(
        replace(slot, values=values.get(i, {})) for i, slot in enumerate(slots)
    )


class PlanCache:
    """The plan of the last committed save of a module.

    ``token`` names the save on all ranks alike; empty, if there is none.
    """

    __slots__ = ("__weakref__", "_merged", "_part", "_ranks", "_token")

    def __init__(self) -> None:
        self._token = ""
        self._ranks: tuple[int, ...] = ()
        self._part: FilePart | None = None
        self._merged: _Merged | None = None

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
        self._merged = _Merged(told, manifest)

    def manifest(self, told: Sequence[Brief], block: int) -> Manifest:
        """Return the manifest of a save that differs from the last in ``told`` only.

        ``block`` are the bytes of payload that a checksum of this save covers.

        Raises: CheckpointError, for scalar state that differs between ranks.
        """
        merged = self._merged
        assert merged is not None
        _require_same_shared(merged, told)
        _require_same_sizes(merged.manifest, told)
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


def _require_same_shared(merged: _Merged, told: Sequence[Brief]) -> None:
    """Raise CheckpointError for scalar state that differs between ranks."""
    # Mostly all parameters have had the same number of steps, and nothing can differ.
    texts = frozenset[tuple[str, str]]().union(*(brief.texts for brief in told))
    if len(texts) == len({name for name, _ in texts}):
        return
    found: dict[tuple[str, int], list[tuple[int, dict[int, dict[str, str]]]]] = {}
    for rank, (brief, keys) in enumerate(zip(told, merged.keys, strict=True)):
        for key, shared in zip(keys, brief.shared, strict=True):
            # Most ranks hold no parameter in part.
            if shared:
                found.setdefault(key, []).append((rank, shared))
    # In the order of the manifest: the first difference is that of a full merge.
    order = dict.fromkeys(key for keys in merged.keys for key in keys)
    for key, region in zip(order, merged.manifest.regions, strict=True):
        require_same_values(region.slots, found.get(key, []))


def _require_same_sizes(manifest: Manifest, told: Sequence[Brief]) -> None:
    """Raise CheckpointError if a file does not fit the places of the last save."""
    # Equal parts give equal files; a mistake here would point loads at other bytes.
    for rank, (brief, file) in enumerate(zip(told, manifest.files, strict=True)):
        sizes = brief.file.header_nbytes, brief.file.payload_nbytes
        if sizes != (file.header_nbytes, file.payload_nbytes):
            raise CheckpointError(
                f"The file of rank {rank} has {sizes} bytes of header and payload, "
                f"expected {(file.header_nbytes, file.payload_nbytes)} as in the last "
                "save, whose plan was reused. Nothing was committed; save again, which "
                "makes a new plan."
            )
