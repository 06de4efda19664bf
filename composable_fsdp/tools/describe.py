"""``describe``: who holds what of a sharded model, or of a checkpoint, by its plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.placements import name_of
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import join_name, size_text
from composable_fsdp.planning import walk
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.storage.manifest import dtype_name
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.opening import NATIVE, find_checkpoint, open_source
from composable_fsdp.storage.source import Source
from composable_fsdp.tools.plan import unit_plan
from composable_fsdp.tools.sharding_plan import fold_units
from composable_fsdp.tools.texts import counted, printable
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states

_RANKS = 4
"""Most ranks in a line of the text; ``as_dict`` has all."""


class HeldPart(NamedTuple):
    """The elements ``[start, stop)`` of a parameter, and the rank that holds them."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class DescribedUnit:
    """A unit of a model; ``state`` is "sharded" or "full"."""

    plan: UnitPlan
    names: Mapping[int, tuple[str, ...]]
    """By index of the slot, the names from the model; a tied parameter has several."""
    ranks: tuple[int, ...]
    """The ranks that hold the shards, in the order of the shards."""
    state: str
    device: str

    def parts(self, region: RegionLayout, slot: ParameterSlot) -> list[HeldPart]:
        """Return the parts of a parameter, one per rank that holds elements."""
        # The ranks without elements are left out: of 1,024 ranks a bias is on one.
        holders = region.holders(slot) if slot.numel else ()
        return [HeldPart(self.ranks[n], *region.interval(slot, n)) for n in holders]

    def as_dict(self) -> dict[str, Any]:
        """Return the unit for JSON."""
        plan, sizes = self.plan, ("numel", "padded_numel", "shard_numel", "trainable")
        # Whole numbers and names alone, so that the JSON can be compared as text.
        return {
            "name": plan.fqn,
            "class": plan.class_name,
            "state": self.state,
            "ranks": self.ranks,
            "replicas": plan.replicas,
            "bytes_per_rank": plan.parameter_bytes,
            "regions": [
                {
                    "dtype": dtype_name(region.dtype),
                    **{name: getattr(region, name) for name in sizes},
                    "parameters": [
                        {
                            "names": self.names[slot.index],
                            "shape": slot.shape,
                            "shards": [p._asdict() for p in self.parts(region, slot)],
                        }
                        for slot in region.parameters
                    ],
                }
                for region in plan.regions
            ],
            "strategy": name_of(plan.options.chosen),
            "device": self.device,
            "offloaded": plan.is_offloaded,
        }

    def lines(self, name: str, times: int) -> Iterator[str]:
        """Yield the lines of ``times`` equal units, of their regions and parameters."""
        plan = self.plan
        replicas = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
        words = [
            f"{name} {plan.class_name}".rstrip() + (f" ({times} x)" * (times > 1)),
            f"{self.state} over {counted(len(self.ranks), 'rank')}{replicas}",
            f"{size_text(plan.parameter_bytes)} per rank",
            name_of(plan.options.chosen),
            self.device,
            *["shards on the host"] * plan.is_offloaded,
        ]
        yield ", ".join(words)
        # The names of equal units differ, so those from the unit stand for all. Columns
        # are as wide as the widest entry of the unit.
        slots = [slot for slot, _ in plan.slots]
        names = [
            " = ".join(self.names[s.index] if times == 1 else s.fqns) for s in slots
        ]
        width = max(map(len, names), default=0)
        shapes = max((len(str(slot.shape)) for slot in slots), default=0)
        shown = {
            slot.index: f"    {name:{width}}  {slot.shape!s:{shapes}}  "
            for slot, name in zip(slots, names, strict=True)
        }
        for region in plan.regions:
            yield (
                f"  {dtype_name(region.dtype)}{'' if region.trainable else ' frozen'}, "
                f"{region.numel:,} elements, {region.shard_numel:,} per rank, "
                f"{region.padded_numel - region.numel:,} of padding"
            )
            for slot in region.parameters:
                # Shards of ``Block.ELEMENT`` may begin inside a row.
                rows = plan.options.keeps_rows and len(slot.shape) > 1 and slot.numel
                row = slot.numel // slot.shape[0] if rows else None
                held = _held(self.parts(region, slot), row, slot.numel)
                # The shape is that of this rank's part of the plain model's parameter.
                whole = "" if slot.whole is None else f", {slot.whole}"
                yield f"{shown[slot.index]}{held}{whole}"


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
        return {
            "title": self.title,
            "units": [unit.as_dict() for unit in self.units],
            "tensors": [
                {**each._asdict(), "parts": [part._asdict() for part in each.parts]}
                for each in self.tensors
            ],
            "optimizer": self.optimizer,
        }

    def __str__(self) -> str:
        # A tied parameter counts once, as in the plan.
        plans = [unit.plan for unit in self.units]
        numel = sum(region.numel for plan in plans for region in plan.regions)
        words = [counted(len(plans), "unit"), f"{numel:,} parameters"]
        if self.tensors:
            words.append(counted(len(self.tensors), "other tensor"))
        # The names of the states tell which optimizer was saved.
        if self.optimizer:
            words.append(
                f"{self.optimizer['tensors']:,} tensors of optimizer state "
                f"({', '.join(self.optimizer['states'])}; "
                f"{size_text(self.optimizer['bytes'])})"
            )
        lines = [f"{self.title}: {', '.join(words)}"]
        for fold in fold_units(plans):
            lines += self.units[fold.indices[0]].lines(fold.name, fold.times)
        if self.tensors:
            lines.append("in no unit, whole on every rank" if self.units else "tensors")
        names = [" = ".join((each.name, *each.also)) for each in self.tensors]
        width = max(map(len, names), default=0)
        for name, each in zip(names, self.tensors, strict=True):
            held = _held(each.parts) if len(each.parts) > 1 else ""
            text = f"  {name:{width}}  {each.kind} {each.dtype} {each.shape}  {held}"
            lines.append(text.rstrip())
        # Names from a file may hold escape sequences.
        return "\n".join(map(printable, lines))


def _tensor(name: str, kind: str, found: Any, *more: Any) -> DescribedTensor:
    """Return the description of a tensor, or of a saved one."""
    return DescribedTensor(name, kind, dtype_name(found.dtype), (*found.shape,), *more)


def _held(parts: Iterable[HeldPart], row: int | None = None, whole: int = -1) -> str:
    """Return which rank holds which elements, or rows of ``row`` elements."""
    words = []
    for rank, start, stop in parts:
        first, last = start // (row or 1), -(-stop // (row or 1)) - 1
        what = "element" if row is None else "row"
        some = f"{what}s {first:,}-{last:,}" if last > first else f"{what} {first:,}"
        words.append(f"rank {rank}: {'whole' if stop - start == whole else some}")
    # Of many ranks the first two and the last tell the sizes.
    if len(words) > _RANKS:
        words = [*words[:2], f"... ({len(words) - 3} more)", words[-1]]
    return " | ".join(words) or "no elements"


def describe(what: nn.Module | str | PathLike[str]) -> Description:
    """Return who holds what of a sharded model, or of a checkpoint of any format.

    ``print`` shows units, dtypes, shapes, and the rows or elements of each rank, with
    padding, ties and frozen parameters; ``as_dict()`` is the same for JSON. A
    checkpoint shows tensors, and one of ``save`` which rank has written which elements.

    Raises: CompositionError, if the model has no unit; CheckpointError, if the
        checkpoint cannot be read; TypeError, for anything else.
    No values are read, and the model may be in any phase of a step.

    >>> described = describe(model)
    >>> described.units[1].plan.fqn
    'blocks.0'
    >>> describe("runs/step-100").tensors[0].parts
    (HeldPart(rank=0, start=0, stop=16),)
    """
    if isinstance(what, nn.Module):
        return _of_model(what)
    if not isinstance(what, (str, PathLike)):
        raise TypeError(
            f"describe expects a module or the path of a checkpoint, got a "
            f"{type(what).__name__}."
        )
    return _of_checkpoint(what)


def _of_model(model: nn.Module) -> Description:
    """Return the description of a sharded model."""
    # The walk leaves units of other models inside alone, as a step does.
    states = [(fqn, state) for fqn, _, state in walk_states(model)]
    if not states:
        raise CompositionError(
            f"describe was called on a {type(model).__name__} that holds no fully "
            "sharded module. Apply fully_shard first, or call plan for a model that is "
            "not sharded yet."
        )
    # Wrappers add no component to the names.
    named = list(walk.named(model))
    names = {id(module): fqn for fqn, module in named}
    # While a unit is full, its modules show the full leaves.
    handles = [state.handle for _, state in states]
    held = {id(leaf) for h in handles for leaf in (*h.leaves, *h.form.placed)}
    return Description(
        type(model).__name__,
        tuple(_unit_of(fqn, state, names) for fqn, state in states),
        tuple(
            _tensor(join_name(fqn, key), kind, tensor)
            for fqn, module in named
            for kind in ("parameter", "buffer")
            for key, tensor in getattr(module, f"_{kind}s").items()
            # A module may register None in the place of a bias.
            if tensor is not None and id(tensor) not in held
        ),
    )


def _unit_of(fqn: str, state: _FSDPState, names: Mapping[int, str]) -> DescribedUnit:
    """Return a unit of a model; ``names`` has the name of each module by identity."""
    layout, groups = state.handle.layout, state.handle.groups
    # From the places and not from the plan: modules of a list have names of their own,
    # and a tied parameter has several places.
    held: dict[int, tuple[str, ...]] = {}
    places = zip(layout.places, layout.owners, layout.keys, strict=True)
    for place, owner, key in places:
        name = join_name(names.get(id(owner), ""), key)
        held[place.slot_index] = (*held.get(place.slot_index, ()), name)
    here = dist.get_rank() if dist.is_initialized() else 0
    # A group of one rank is no group.
    shard = groups.shard
    ranks = [here] if shard is None else dist.get_process_group_ranks(shard)
    return DescribedUnit(
        unit_plan(fqn, state),
        held,
        tuple(ranks),
        "full" if state.handle.is_full else "sharded",
        str(layout.device),
    )


def _of_checkpoint(path: str | PathLike[str]) -> Description:
    """Return the description of a checkpoint."""
    found, kind = find_checkpoint(path)
    # Without the loose tensors, so that no byte of the payload is read.
    source: Source = (
        NativeSource(found, values=False) if kind == NATIVE else open_source(found)
    )
    with source:
        # Formats other than native may keep ties, too.
        also: dict[str, tuple[str, ...]] = {}
        for name, kept in source.aliases.items():
            also[kept] = (*also.get(kept, ()), name)
        native = source.manifest if isinstance(source, NativeSource) else None
        parts = {
            saved.fqns[0]: tuple(
                HeldPart(at.file, start, stop)
                for at, (start, stop, _) in zip(saved.parts, saved.spans(), strict=True)
            )
            for saved in (native.tensors if native else ())
            # Parts of columns are no intervals of the tensor.
            if len(saved.begins) < 2
        }
        tensors = [
            _tensor(name, "tensor", info, also.get(name, ()), parts.get(name, ()))
            for name, info in source.model.items()
        ]
        # Tensors that ranks have saved for themselves.
        tensors += [
            _tensor(each.fqns[0], f"tensor of rank {rank}", each, tuple(each.fqns[1:]))
            for rank, local in enumerate(native.local if native else ())
            for each in local.tensors
        ]
        infos = [each for states in source.optim.values() for each in states.items()]
    optimizer = {
        "tensors": len(infos),
        "bytes": sum(info.nbytes for _, info in infos),
        # A dict and not a set, to keep the order of the optimizer.
        "states": list(dict.fromkeys(state for state, _ in infos)),
    }
    title = f"{found}, {kind} checkpoint"
    return Description(title, (), tuple(tensors), optimizer if infos else None)
