"""``describe``: who holds what of a sharded model, or of a checkpoint.

::

    model       units and their states --.
                                          >-- Description --> str(), as_dict()
    checkpoint  tensors of the manifest --'

A description is made of plans, so it needs no collective and reads no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike

import torch.distributed as dist
from torch import nn

from composable_fsdp.errors import CompositionError
from composable_fsdp.inspection.description import (
    DescribedTensor,
    DescribedUnit,
    Description,
    HeldPart,
)
from composable_fsdp.naming import join_name
from composable_fsdp.planning import walk
from composable_fsdp.storage.manifest import Local, SavedTensor
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.opening import NATIVE, find_checkpoint, open_source
from composable_fsdp.storage.source import Source
from composable_fsdp.tools.plan_in_force import unit_plan
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states


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
        own: tuple[Local, ...] = ()
        parts: dict[str, tuple[HeldPart, ...]] = {}
        if isinstance(source, NativeSource):
            own = source.manifest.local
            parts = {each.fqns[0]: _parts(each) for each in source.manifest.tensors}
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
                parts.get(name, ()),
            )
            for name, info in source.model.items()
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
    return Description(title, (), tensors, optimizer if infos else None)


def _of_ranks(own: tuple[Local, ...]) -> Iterator[DescribedTensor]:
    """Yield the tensors that ranks have saved for themselves, for each rank."""
    for rank, each in enumerate(own):
        for saved in each.tensors:
            name, *others = saved.fqns
            dtype = str(saved.dtype).removeprefix("torch.")
            shape, kind = saved.shape, f"tensor of rank {rank}"
            yield DescribedTensor(name, kind, dtype, shape, tuple(others))


def _parts(saved: SavedTensor) -> tuple[HeldPart, ...]:
    """Return which rank has written which elements of a tensor."""
    # Parts of columns are no intervals of the tensor.
    if len(saved.begins) > 1:
        return ()
    return tuple(
        HeldPart(at.file, start, stop)
        for at, (_, start, stop) in zip(saved.parts, saved.intervals(), strict=True)
    )
