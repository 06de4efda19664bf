"""Refusing a part of a unit that is called while the unit is sharded.

A part is a module that holds parameters of a unit and has no hooks of that unit: its
forward would compute with this rank's rows, which fits on some ranks and not on others.
Where nothing is cut (NO_SHARD, ``replicate``), it would compute with whole weights, and
send its gradients past the unit, which averages them: refused with gradients enabled.
A container without a forward (``nn.ParameterList``) is nobody's call, so the module
around it, whose forward reads its parameters, is the part.

While the unit is sharded, each part has a pre-hook that refuses the call; while it is
full, none has, so that a step pays a table entry per part and no call::

    use_sharded    hooks[REFUSE] = refuse_part      for hooks in handle.guards
    pre_forward    del hooks[REFUSE]

So torch sees no hook on a part inside its unit's forward, where a hook would keep
``nn.TransformerEncoderLayer`` from its fast path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.naming import join_name, quoted

REFUSE = -2
"""Key of the refusal among a part's pre-hooks. Torch numbers from 0 up."""


def find_guards(
    handle: FlatParamHandle, modules: Sequence[nn.Module]
) -> tuple[dict[int, Any], ...]:
    """The pre-hooks of the unit's parts; ``modules`` are those with the unit's hooks.

    None where one rank has it all: its shard is the whole, and its gradient the mean.
    """
    if handle.groups.world_size == 1:
        return ()
    parts = {id(owner): owner for owner in handle.owners if has_forward(owner)}
    without = {id(owner) for owner in handle.owners} - parts.keys()
    if without:
        for module in modules:
            parts.update(_readers(module, without))
    for module in modules:
        parts.pop(id(module), None)
    return tuple([part._forward_pre_hooks for part in parts.values()])


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called, unlike ``nn.ParameterList``."""
    # Torch's place holder raises; an instance may have one of its own. Classes of
    # TorchScript do not tell theirs.
    method = getattr(type(module), "forward", None)
    return method is not nn.Module.forward or "forward" in vars(module)


def _readers(root: nn.Module, without: set[int]) -> dict[int, nn.Module]:
    """The nearest modules with a forward around each of ``without``, from ``root``."""
    found: dict[int, nn.Module] = {}
    seen: set[tuple[int, int]] = set()
    waiting = [(root, root)]
    while waiting:
        module, reader = waiting.pop()
        if has_forward(module):
            reader = module
        elif id(module) in without:
            found[id(reader)] = reader
        # A container may be held by several modules, each of which reads it.
        if (id(module), id(reader)) not in seen:
            seen.add((id(module), id(reader)))
            below = (child for child in module._modules.values() if child is not None)
            waiting.extend((child, reader) for child in below)
    return found


def refuse_part_calls(handle: FlatParamHandle) -> None:
    """Have the unit's parts refuse calls while sharded leaves are shown."""
    for hooks in handle.guards:
        hooks[REFUSE] = refuse_part
    handle.parts_open = False


def allow_part_calls(handle: FlatParamHandle) -> None:
    """Take the refusal from the unit's parts, for a forward. Sends nothing.

    A refusal that stays lets pass what reads full leaves: no part is called in most
    backwards, so those leave it.
    """
    for hooks in handle.guards:
        if REFUSE in hooks:  # users clear hooks
            del hooks[REFUSE]
    handle.parts_open = True


def _refuse_part(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Pre-hook of a part. A function of no unit, so that a copied module may keep it.

    Raises: PhaseError, if one of the module's own parameters, or of its containers
    without a forward, is a shard, or is whole and would get this rank's gradient; the
    parameters of ``torch.func.functional_call`` are none.
    """
    for path, holder in _holders(module, ""):
        for key, parameter in holder._parameters.items():
            found = find_leaf(parameter)
            if found is None or parameter is None:
                continue
            handle, cut = found[0], _is_cut(*found)
            if not cut:
                trains = torch.is_grad_enabled() and parameter.requires_grad
                if not trains or handle.groups.world_size == 1:
                    continue
            place = _name(handle, holder)
            part = place.removesuffix(path).removesuffix(".") if path else place
            made = f"{type(module).__name__} {quoted(part)}"
            reason = _whose_rows if cut else _whose_gradient
            raise PhaseError(
                reason(handle, made, quoted(part), quoted(join_name(place, key)))
            )


def _holders(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and its containers that have no forward, with their names from it."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not has_forward(child):
            yield from _holders(child, join_name(path, name))


def _whose_rows(handle: FlatParamHandle, made: str, part: str, name: str) -> str:
    unit = _unit(handle)
    return (
        f"{made} was called while fully sharded module {unit}, which gathers its "
        f"parameters, is sharded: it would compute with this rank's rows of {name}. "
        f"Call {unit}; or, for a method of {unit} that calls its parts, "
        f"register_forward_method(module, name); or make {part} a fully sharded module "
        "as well, before its parent. Outside the step, unshard_params(module) shows "
        "whole parameters."
    )


def _whose_gradient(handle: FlatParamHandle, made: str, part: str, name: str) -> str:
    unit = _unit(handle)
    return (
        f"{made} was called outside the forward of module {unit}, which averages "
        f"gradients over {handle.groups.world_size} ranks: that of {name} would be "
        f"this rank's alone. Call {unit}; or, for a method of {unit} that calls its "
        f"parts, register_forward_method(module, name); or give {part} a unit of its "
        "own, before its parent. Without gradients, call it under torch.no_grad()."
    )


def _unit(handle: FlatParamHandle) -> str:
    # Until lazy initialization a unit has its name from where it was sharded.
    return quoted(handle.full_fqn) if handle.full_fqn else _class_of(handle)


refuse_part: Any = vars(torch)["_disable_dynamo"](_refuse_part)
# Pickled by name, as other hooks of a module.
refuse_part.__module__, refuse_part.__qualname__ = __name__, "refuse_part"


def _is_cut(handle: FlatParamHandle, index: int) -> bool:
    for region in handle.regions:
        if index < len(region.leaves):
            return region.layout.world_size > 1
        index -= len(region.leaves)
    return False


def _class_of(handle: FlatParamHandle) -> str:
    return f"({handle.plan.class_name})"


def _name(handle: FlatParamHandle, module: nn.Module) -> str:
    """The part's name, by the first place at which the unit's module holds it."""
    for place, owner in zip(handle.places, handle.owners, strict=True):
        if owner is module:
            return join_name(handle.full_fqn, place.fqn.rpartition(".")[0])
    return ""
