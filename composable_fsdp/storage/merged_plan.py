"""The merged plan of a save, and the values that change while the plan stays.

::

    plan     regions, cuts, grids, singles, places     merged once, by the first save
    brief    checksums, scalars, extra, options        of each rank, of each save
    both     the manifest of a later save
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.cuts import CutPart, require_same_state
from composable_fsdp.storage.file_part import FilePart
from composable_fsdp.storage.local import LocalPart, merge_local
from composable_fsdp.storage.manifest import (
    Cut,
    File,
    Grid,
    Json,
    Manifest,
    Region,
    SavedMetric,
    Single,
    Slot,
    fields_text,
    text_of_value,
)
from composable_fsdp.storage.merge import (
    RankPart,
    loose_shifts,
    require_same_values,
    shifted,
    single_parts,
)

_CONSTANT = ("loose",)
"""The fields of a manifest that follow from the parts alone."""
_CONSTANT_OF = {
    "regions": (Region, ("shards", "states")),
    "cuts": (Cut, ("begins", "parts", "states")),
    "grids": (Grid, ("cuts", "begins", "parts", "states")),
}
"""The fields of a region, cut or grid with a place for each rank."""
_Alone = TypeVar("_Alone", Cut, Grid)


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
    cuts: list[tuple[dict[str, Json], dict[str, str]]]
    """Per cut part, ``CutPart.values`` and ``CutPart.shared``."""
    local: LocalPart
    """The rank's own values; of each tensor only the number and the values."""
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
        def once(told: dict[str, str]) -> dict[str, str]:
            return {name: texts.setdefault(text, text) for name, text in told.items()}

        shared = [
            {i: once(each) for i, each in region.shared.items()}
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
            [(cut.values, once(cut.shared)) for cut in part.cuts],
            replace(
                part.local,
                singles=[(i, each.values) for i, each in enumerate(part.local.singles)],
            ),
            part.rng,
            part.per_rank,
            part.extra,
            part.own_states,
            part.param_groups,
            part.metric,
        )


class MergedPlan:
    """The merged plan, on rank 0."""

    __slots__ = (
        "_constant",
        "_texts",
        "cuts",
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
        self.cuts = _writers(told)
        """Per parameter stored alone, the ranks and numbers of its parts, in order."""
        self.numbers = told[0][0].group_numbers
        """The number of each group of options of rank 0 in the optimizer."""
        self.experts = [part.experts for part, _, _ in told]
        """Per rank, the experts by the number of their group."""
        self._constant: dict[str, str] = {}
        self._texts: dict[str, list[dict[str, str]]] | None = None
        """The constant fields as JSON: of each region, each cut and each grid."""

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
        return replace(
            self.manifest,
            regions=tuple(regions),
            singles=tuple(singles),
            cuts=tuple(self._alone(self.manifest.cuts, told)),
            grids=tuple(self._alone(self.manifest.grids, told)),
            local=merge_local(
                [brief.local for brief in told],
                self._single_of,
                lambda value, rank: shifted(value, self.shifts[rank]),
            ),
        )

    def _alone(
        self, found: Sequence[_Alone], told: Sequence[Brief]
    ) -> Iterator[_Alone]:
        """Yield cuts or grids with the scalar states of ``told``."""
        for each in found:
            # The rank with the first element has told the scalars.
            rank, number = self.cuts[each.fqns[0]][0]
            values, _ = told[rank].cuts[number]
            yield replace(each, values=shifted(values, self.shifts[rank]))

    def _single_of(self, rank: int, told: tuple[int, dict[str, Json]]) -> Single:
        """Return a tensor of a rank alone, from its number there and its values."""
        number, values = told
        known = self.manifest.local[rank].singles[number]
        return replace(known, values=shifted(values, self.shifts[rank]))

    def require_same_shared(self, told: Sequence[Brief]) -> None:
        """Raise CheckpointError for scalar state that differs between ranks."""
        # In the order of a full merge, whose first error is raised.
        self._require_same_cuts(told)
        # Mostly all parameters have had the same number of steps, and nothing can
        # differ.
        texts = frozenset[tuple[str, str]]().union(*(brief.texts for brief in told))
        if len(texts) == len({name for name, _ in texts}):
            return
        found: dict[tuple[str, int], list[tuple[int, dict[int, dict[str, str]]]]] = {}
        for rank, (brief, keys) in enumerate(zip(told, self.keys, strict=True)):
            for key, shared in zip(keys, brief.shared, strict=True):
                # Most ranks hold no parameter in part.
                if shared:
                    found.setdefault(key, []).append((rank, shared))
        # In the order of the manifest: the first difference is that of a full merge.
        order = dict.fromkeys(key for keys in self.keys for key in keys)
        for key, region in zip(order, self.manifest.regions, strict=True):
            require_same_values(region.slots, found.get(key, []))

    def _require_same_cuts(self, told: Sequence[Brief]) -> None:
        """Raise CheckpointError for scalar state that differs between parts."""
        alone = {each.fqns[0]: each for each in self.manifest.alone()}
        for name, written in self.cuts.items():
            shared = [(rank, told[rank].cuts[number][1]) for rank, number in written]
            # A state that a part lacks is a difference, too.
            if all(texts == shared[0][1] for _, texts in shared):
                continue
            each = alone[name]
            facts = each.fqns, each.dtype, each.shape
            states = {state: (found.dtype, "") for state, found in each.states.items()}
            require_same_state(
                [
                    (rank, CutPart(*facts, 0, 0, "", states, shared=texts))
                    for rank, texts in shared
                ]
            )

    def texts(self, manifest: Manifest) -> dict[str, str]:
        """Return JSON of fields of ``manifest``, of constant texts and new values."""
        # Made once, by the save that merges, which writes them at once.
        if self._texts is None:
            self._constant = {
                name: text_of_value(getattr(manifest, name)) for name in _CONSTANT
            }
            self._texts = {
                name: [
                    {n: text_of_value(getattr(each, n)) for n in constant}
                    for each in getattr(manifest, name)
                ]
                for name, (_, constant) in _CONSTANT_OF.items()
            }
        found = dict(self._constant)
        # The places of shards are most of a manifest: one per rank, region and state.
        for name, (kind, _) in _CONSTANT_OF.items():
            names = [each.name for each in fields(kind)]
            texts = [
                fields_text(each, names, known)
                for each, known in zip(
                    getattr(manifest, name), self._texts[name], strict=True
                )
            ]
            found[name] = f"[{','.join(texts)}]"
        return found


def _with_values(
    slots: Sequence[Slot], values: dict[int, dict[str, Json]]
) -> tuple[Slot, ...]:
    """Return the slots with other scalar states."""
    return tuple(
        replace(slot, values=values.get(i, {})) for i, slot in enumerate(slots)
    )


def _writers(told: Sequence[RankPart]) -> dict[str, list[tuple[int, int]]]:
    """Return the ranks and numbers of the parts of parameters that are stored alone."""
    found: dict[str, list[tuple[int, int]]] = {}
    for rank, (part, _, _) in enumerate(told):
        for number, cut in enumerate(part.cuts):
            found.setdefault(cut.names[0], []).append((rank, number))

    def place(writer: tuple[int, int]) -> tuple[tuple[int, ...], int]:
        cut = told[writer[0]][0].cuts[writer[1]]
        return () if cut.rectangle is None else cut.rectangle.offset, cut.start

    # The order of the elements, as in a full merge.
    return {name: sorted(writers, key=place) for name, writers in found.items()}


def require_same_sizes(manifest: Manifest, told: Sequence[Brief]) -> None:
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
