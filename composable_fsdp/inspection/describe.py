"""``describe``: who holds what of a sharded model, or of a checkpoint.

::

    model       units and their states --.
                                          >-- Description --> str(), as_dict()
    checkpoint  regions of the manifest --'

A description is made of plans, so it needs no collective and reads no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike

import torch.distributed as dist
from torch import nn

from composable_fsdp.config import Block
from composable_fsdp.errors import CompositionError
from composable_fsdp.inspection.description import (
    DescribedTensor,
    DescribedUnit,
    Description,
)
from composable_fsdp.naming import join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout, row_block
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.storage.manifest import Local, Region
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.opening import NATIVE, find_checkpoint, open_source
from composable_fsdp.storage.source import Source
from composable_fsdp.tree.plan_in_force import unit_plan
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states


def describe(what: nn.Module | str | PathLike[str]) -> Description:
    """Return who holds what of a sharded model, or of a checkpoint of any format.

    ``print`` shows units, dtypes, shapes, and the rows or elements of each rank, with
    padding, ties and frozen parameters; ``as_dict()`` is the same for JSON. A
    checkpoint of ``save`` shows the shards that were saved; other formats have whole
    tensors.

    Raises: CompositionError, if the model has no unit; CheckpointError, if the
        checkpoint cannot be read; TypeError, for anything else.
    No values are read, and the model may be in any phase of a step.

    >>> described = describe(model)
    >>> described.units[1].plan.fqn
    'blocks.0'
    >>> describe("runs/step-100").units[1].state
    'saved'
    """
    # A module is no path, and a path is no module, so one function takes both.
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
    names = {id(module): fqn for fqn, module in walk.named(model)}
    return Description(
        type(model).__name__,
        tuple(_unit_of(fqn, state, names) for fqn, state in states),
        tuple(_tensors_of(model, [state for _, state in states])),
    )


def _unit_of(fqn: str, state: _FSDPState, names: Mapping[int, str]) -> DescribedUnit:
    """Return a unit of a model; ``names`` has the name of each module by identity."""
    layout = state.handle.layout
    # From the places and not from the plan: modules of a list have names of their own.
    held: dict[int, tuple[str, ...]] = {}
    # A tied parameter has several places.
    for place, owner, key in zip(
        layout.places, layout.owners, layout.keys, strict=True
    ):
        name = join_name(names.get(id(owner), ""), key)
        held[place.slot_index] = (*held.get(place.slot_index, ()), name)
    group, experts = state.handle.groups.shard, state.handle.groups.experts
    everyone = [] if experts is None else dist.get_process_group_ranks(experts)
    return DescribedUnit(
        unit_plan(fqn, state),
        held,
        # A group of one rank is no group.
        tuple(dist.get_process_group_ranks(group))
        if group is not None
        else (dist.get_rank() if dist.is_initialized() else 0,),
        "full" if state.handle.is_full else "sharded",
        str(layout.device),
        # Of this rank's experts the line itself tells.
        tuple([rank for rank in everyone if rank != dist.get_rank()]),
    )


def _tensors_of(
    model: nn.Module, states: list[_FSDPState]
) -> Iterator[DescribedTensor]:
    """Yield the buffers of a model, and the parameters that no unit holds."""
    # While a unit is full, its modules show the full leaves.
    held = {
        id(leaf)
        for state in states
        for leaf in (*state.handle.leaves, *state.handle.form.placed)
    }
    for fqn, module in walk.named(model):
        for kind, table in (
            ("parameter", module._parameters),
            ("buffer", module._buffers),
        ):
            for key, tensor in table.items():
                # A module may register None in the place of a bias.
                if tensor is not None and id(tensor) not in held:
                    yield DescribedTensor(
                        join_name(fqn, key),
                        kind,
                        str(tensor.dtype).removeprefix("torch."),
                        tuple(tensor.shape),
                    )


def _of_checkpoint(path: str | PathLike[str]) -> Description:
    """Return the description of a checkpoint."""
    found, kind = find_checkpoint(path)
    # Without the loose tensors, so that no byte of the payload is read.
    source: Source = (
        NativeSource(found, values=False) if kind == NATIVE else open_source(found)
    )
    with source:
        units: tuple[DescribedUnit, ...] = ()
        own: tuple[Local, ...] = ()
        if isinstance(source, NativeSource):
            units = tuple(_saved_units(source.manifest.regions))
            own = source.manifest.local
        # What is left are buffers, and parameters that were not sharded.
        in_units = {
            name for unit in units for names in unit.names.values() for name in names
        }
        # Formats other than native may keep ties, too.
        also: dict[str, tuple[str, ...]] = {}
        for name, kept in source.aliases.items():
            also[kept] = (*also.get(kept, ()), name)
        tensors = tuple(
            DescribedTensor(
                name,
                "tensor",
                str(info.dtype).removeprefix("torch."),
                info.shape,
                also.get(name, ()),
            )
            for name, info in source.model.items()
            if name not in in_units
        )
        tensors += tuple(_of_ranks(own))
        infos = [
            (state, info)
            for own in source.optim.values()
            for state, info in own.items()
        ]
    optimizer = {
        "tensors": len(infos),
        "bytes": sum(info.nbytes for _, info in infos),
        # A dict and not a set, to keep the order of the optimizer.
        "states": list(dict.fromkeys(state for state, _ in infos)),
    }
    title = f"{found}, {kind} checkpoint"
    return Description(title, units, tensors, optimizer if infos else None)


def _of_ranks(own: tuple[Local, ...]) -> Iterator[DescribedTensor]:
    """Yield the tensors that ranks have saved for themselves, for each rank."""
    for rank, each in enumerate(own):
        for single in each.singles:
            name, *others = single.fqns
            dtype = str(single.tensor.dtype).removeprefix("torch.")
            shape, kind = single.tensor.shape, f"tensor of rank {rank}"
            yield DescribedTensor(name, kind, dtype, shape, tuple(others))


def _saved_units(regions: tuple[Region, ...]) -> Iterator[DescribedUnit]:
    """Yield the units of a checkpoint of ``save``."""
    by_unit: dict[str, list[Region]] = {}
    # A unit has a region per dtype, in the order of the manifest.
    for region in regions:
        by_unit.setdefault(region.unit, []).append(region)
    for unit, own in by_unit.items():
        names: dict[int, tuple[str, ...]] = {}
        layouts = []
        for region in own:
            slots = []
            for slot in region.slots:
                # The manifest has no numbers of parameters; any distinct ones do.
                index = len(names)
                names[index] = slot.fqns
                slots.append(
                    ParameterSlot(
                        # From the unit, so that equal units are equal plans.
                        tuple(fqn.removeprefix(f"{unit}.") for fqn in slot.fqns),
                        slot.shape,
                        slot.numel,
                        row_block(slot.shape),
                        slot.offset,
                        index,
                    )
                )
            # ``block`` is not saved; the offsets say all that is shown.
            layouts.append(
                RegionLayout(
                    dtype=region.dtype,
                    trainable=True,
                    block=1,
                    world_size=len(region.shards),
                    numel=sum(slot.numel for slot in slots),
                    padded_numel=region.padded_numel,
                    shard_numel=region.shard_numel,
                    parameters=tuple(slots),
                )
            )
        # All regions of a unit are over the same ranks.
        ranks = len(own[0].shards)
        # A shard may begin inside a row, if the model was sharded by elements.
        rows = all(_cuts_rows(layout) for layout in layouts)
        options = UnitOptions(block=Block.ROW if rows else Block.ELEMENT)
        yield DescribedUnit(
            UnitPlan(unit, "", tuple(layouts), options, ranks, 1),
            names,
            tuple(range(ranks)),
            "saved",
        )


def _cuts_rows(region: RegionLayout) -> bool:
    """Return whether all shards begin and end at whole rows of each parameter."""
    return all(
        not (start % slot.block or stop % slot.block)
        for slot in region.parameters
        if slot.numel
        for start, stop in (region.interval(slot, r) for r in region.holders(slot))
    )
