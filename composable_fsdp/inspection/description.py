"""``Description``: who holds what, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from composable_fsdp.naming import printable, size_text
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.fold import Fold, fold_units

_RANKS = 4
"""Most ranks in a line of the text; ``as_dict`` has all."""

_OUTSIDE = "in no unit, whole on every rank"
"""The line above the tensors that no unit holds."""


class HeldPart(NamedTuple):
    """The elements ``[start, stop)`` of a parameter, and the rank that holds them."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class DescribedUnit:
    """A unit of a model.

    Args:
        plan: the unit as integers and names; the names are from the unit's module.
        names: by index of the slot, the names of a parameter from the model; a tied
            parameter has several.
        ranks: the ranks that hold the shards, in the order of the shards.
        state: "sharded" or "full".
        device: the device of the full parameters.
        experts: the ranks with other experts, of a unit with an ``expert_mesh``.
    """

    plan: UnitPlan
    names: Mapping[int, tuple[str, ...]]
    ranks: tuple[int, ...]
    state: str
    device: str
    experts: tuple[int, ...] = ()

    def parts(self, region: RegionLayout, slot: ParameterSlot) -> list[HeldPart]:
        """Return the parts of a parameter, one per rank that holds elements."""
        # The ranks without elements are left out: of 1,024 ranks a bias is on one.
        if not slot.numel:
            return []
        return [
            HeldPart(self.ranks[shard], *region.interval(slot, shard))
            for shard in region.holders(slot)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the unit for JSON."""
        plan = self.plan
        # Whole numbers and names alone, so that the JSON can be compared as text.
        found: dict[str, Any] = {
            "name": plan.fqn,
            "class": plan.class_name,
            "state": self.state,
            "ranks": list(self.ranks),
            "replicas": plan.replicas,
            "bytes_per_rank": plan.parameter_bytes,
            "regions": [self._region(region) for region in plan.regions],
            "strategy": plan.options.strategy.name,
            "device": self.device,
            "offloaded": plan.is_offloaded,
        }
        # Most units have the same parameters on all ranks.
        return {**found, "experts": list(self.experts)} if self.experts else found

    def _region(self, region: RegionLayout) -> dict[str, Any]:
        """Return a region for JSON."""
        return {
            "dtype": str(region.dtype).removeprefix("torch."),
            "numel": region.numel,
            "padded_numel": region.padded_numel,
            "shard_numel": region.shard_numel,
            "parameters": [
                {
                    "names": list(self.names[slot.index]),
                    "shape": list(slot.shape),
                    "offset": slot.offset,
                    "shards": [part._asdict() for part in self.parts(region, slot)],
                }
                for slot in region.parameters
            ],
            "trainable": region.trainable,
        }


class DescribedTensor(NamedTuple):
    """A tensor in no unit, which every rank holds whole; or one of a checkpoint."""

    name: str
    kind: str
    """ "parameter" or "buffer" of a model; "tensor" of a checkpoint."""
    dtype: str
    shape: tuple[int, ...]
    also: tuple[str, ...] = ()
    """Further names, if the tensor is tied."""
    parts: tuple[HeldPart, ...] = ()
    """In a checkpoint of ``save``, the elements that each rank has written."""

    def as_dict(self) -> dict[str, Any]:
        """Return the tensor for JSON."""
        found = {**self._asdict(), "shape": list(self.shape), "also": list(self.also)}
        return {**found, "parts": [part._asdict() for part in self.parts]}


@dataclass(frozen=True)
class Description:
    """The units of a model, and the tensors in no unit; or those of a checkpoint.

    ``str()`` is the text, ``as_dict`` the content for JSON.
    """

    title: str
    """The class of the model, or the path and the format of the checkpoint."""
    units: tuple[DescribedUnit, ...]
    tensors: tuple[DescribedTensor, ...]
    optimizer: dict[str, Any] | None = None
    """Of a checkpoint with optimizer state: number and bytes of the tensors, and the
    names of the states. Default None."""

    def as_dict(self) -> dict[str, Any]:
        """Return the description for JSON."""
        found: dict[str, Any] = {
            "title": self.title,
            "units": [unit.as_dict() for unit in self.units],
            "tensors": [each.as_dict() for each in self.tensors],
        }
        # A model has no optimizer, and safetensors files have none.
        return {**found, "optimizer": self.optimizer} if self.optimizer else found

    def __str__(self) -> str:
        lines = [f"{self.title}: {_headline(self)}"]
        for fold, unit in _folds(self.units):
            lines.append(_unit_line(fold, unit))
            lines += _region_lines(fold, unit)
        if self.tensors:
            lines.append(_OUTSIDE if self.units else "tensors")
            # Names are left-aligned, and the columns behind them begin alike.
            width = max(len(_names(each)) for each in self.tensors)
            lines += [
                f"  {_names(each):{width}}  {each.kind} {each.dtype} {each.shape}"
                f"{_written(each.parts)}"
                for each in self.tensors
            ]
        # Names from a file may hold escape sequences.
        return "\n".join(map(printable, lines))


def _headline(described: Description) -> str:
    """Return the number of units and of parameters."""
    # A tied parameter counts once, as in the plan.
    plans = [unit.plan for unit in described.units]
    numel = sum(region.numel for plan in plans for region in plan.regions)
    words = f"{len(plans)} unit{'' if len(plans) == 1 else 's'}, {numel:,} parameters"
    # Checkpoints of other formats, and buffers.
    more = len(described.tensors)
    if more:
        words += f", {more:,} other tensor{'' if more == 1 else 's'}"
    optimizer = described.optimizer
    # The names of the states tell which optimizer was saved.
    if optimizer:
        words += (
            f", {optimizer['tensors']:,} tensors of optimizer state "
            f"({', '.join(optimizer['states'])}; {size_text(optimizer['bytes'])})"
        )
    return words


def _folds(units: Sequence[DescribedUnit]) -> list[tuple[Fold, DescribedUnit]]:
    """Return equal units together, each with the first of them.

    A fold of a single unit has the names from the model, as the text prints them.
    """
    found = []
    for fold in fold_units([unit.plan for unit in units]):
        unit = units[fold.indices[0]]
        # The names of equal units differ, so those from the unit stand for all.
        if fold.times == 1:
            fold = fold._replace(unit=replace(fold.unit, regions=_renamed(unit)))
        found.append((fold, unit))
    return found


def _renamed(unit: DescribedUnit) -> tuple[RegionLayout, ...]:
    """Return the regions with the names from the model."""
    return tuple(
        replace(
            region,
            parameters=tuple(
                replace(slot, fqns=unit.names[slot.index]) for slot in region.parameters
            ),
        )
        for region in unit.plan.regions
    )


def _unit_line(fold: Fold, unit: DescribedUnit) -> str:
    """Return the line of equal units."""
    # Replicas hold the same shards, so only their number is told.
    plan, ranks = unit.plan, len(unit.ranks)
    words = [f"{fold.name} {plan.class_name}".rstrip()]
    if fold.times > 1:
        words[0] += f" ({fold.times} x)"
    replicas = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
    words.append(f"{unit.state} over {ranks} rank{'' if ranks == 1 else 's'}{replicas}")
    if unit.experts:
        words.append(f"other experts on ranks {list(unit.experts)}")
    words.append(f"{size_text(plan.parameter_bytes)} per rank")
    words += [plan.options.strategy.name, unit.device]
    if plan.is_offloaded:
        words.append("shards on the host")
    return ", ".join(words)


def _region_lines(fold: Fold, unit: DescribedUnit) -> list[str]:
    """Return the lines of the regions of equal units, and of their parameters."""
    lines = []
    # A row per parameter, with columns as wide as the widest entry of the unit.
    slots = [slot for region in fold.unit.regions for slot in region.parameters]
    width = max((len(" = ".join(slot.fqns)) for slot in slots), default=0)
    shapes = max((len(str(slot.shape)) for slot in slots), default=0)
    for region in fold.unit.regions:
        dtype = str(region.dtype).removeprefix("torch.")
        frozen = "" if region.trainable else " frozen"
        padding = region.padded_numel - region.numel
        lines.append(
            f"  {dtype}{frozen}, {region.numel:,} elements, {region.shard_numel:,} per "
            f"rank, {padding:,} of padding"
        )
        for slot in region.parameters:
            names = " = ".join(slot.fqns)
            held = _held(unit, region, slot)
            # The shape is that of this rank's part of the plain model's parameter.
            if slot.whole is not None:
                held += f", {slot.whole}"
            lines.append(f"    {names:{width}}  {slot.shape!s:{shapes}}  {held}")
    return lines


def _held(unit: DescribedUnit, region: RegionLayout, slot: ParameterSlot) -> str:
    """Return which rank holds what of a parameter, at most four ranks."""
    # Shards of ``Block.ELEMENT`` may begin inside a row.
    rows = unit.plan.options.keeps_rows
    words = [
        f"rank {part.rank}: {_part_words(slot, part.start, part.stop, rows=rows)}"
        for part in unit.parts(region, slot)
    ]
    return _few(words) or "no elements"


def _few(words: list[str]) -> str:
    """Return the words of each rank in a line, at most four ranks."""
    # Of many ranks the first two and the last tell the sizes.
    if len(words) > _RANKS:
        words = [*words[:2], f"... ({len(words) - 3} more)", words[-1]]
    return " | ".join(words)


def _written(parts: Sequence[HeldPart]) -> str:
    """Return which rank has written what of a tensor, if several have."""
    if len(parts) < 2:
        return ""
    told = [f"rank {r}: {_range('element', a, b - 1)}" for r, a, b in parts]
    return f"  {_few(told)}"


def _part_words(slot: ParameterSlot, start: int, stop: int, *, rows: bool) -> str:
    """Return the part ``[start, stop)`` of a parameter in words."""
    if (start, stop) == (0, slot.numel):
        return "whole"
    # Shards of Block.ELEMENT may begin inside a row.
    if rows and len(slot.shape) > 1:
        width = slot.numel // slot.shape[0]
        return _range("row", start // width, (stop - 1) // width)
    return _range("element", start, stop - 1)


def _range(what: str, first: int, last: int) -> str:
    """Return a range of rows or elements in words."""
    return f"{what}s {first:,}-{last:,}" if last > first else f"{what} {first:,}"


def _names(tensor: DescribedTensor) -> str:
    """Return all names of a tensor."""
    return " = ".join((tensor.name, *tensor.also))
