"""Refusing a part of a unit that is called while the unit is sharded.

A part is a module that holds parameters of a unit and has no hooks of that unit: its
forward would compute with this rank's rows, which fits on some ranks and not on others.
While the unit is sharded, each part has a pre-hook that refuses the call; while it is
full, none has, so that a step pays a table entry per part and no call::

    use_sharded    hooks[REFUSE] = refuse_part      for hooks in handle.guards
    use_full       del hooks[REFUSE]

So torch sees no hook on a part inside its unit's forward, where a hook would keep
``nn.TransformerEncoderLayer`` from its fast path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.naming import join, shown

REFUSE = -2
"""Key of the refusal among a part's pre-hooks. Torch numbers from 0 up."""


def find_guards(
    handle: FlatParamHandle, modules: Sequence[nn.Module]
) -> tuple[dict[int, Any], ...]:
    """The pre-hooks of the unit's parts; ``modules`` are those with the unit's hooks.

    None where nothing is cut: each rank's shard is the whole then.
    """
    if all(region.layout.world_size == 1 for region in handle.regions):
        return ()
    parts = {id(owner): owner for owner in handle.owners}
    for module in modules:
        parts.pop(id(module), None)
    return tuple([part._forward_pre_hooks for part in parts.values()])


def close(handle: FlatParamHandle) -> None:
    """Have the unit's parts refuse calls. Its sharded leaves are shown. Sends nothing.

    ``views.use_sharded`` does the same without this call.
    """
    for hooks in handle.guards:
        hooks[REFUSE] = refuse_part


def open_(handle: FlatParamHandle) -> None:
    """Let the unit's parts be called. Its full leaves are shown. Sends nothing.

    ``views.use_full`` does the same without this call.
    """
    for hooks in handle.guards:
        hooks.pop(REFUSE, None)


def _refuse_part(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Pre-hook of a part. A function of no unit, so that a copied module may keep it.

    Raises: PhaseError, if one of the module's own parameters is a shard; the parameters
    of ``torch.func.functional_call`` are none.
    """
    for key, parameter in module._parameters.items():
        found = find_leaf(parameter)
        if found is None or not _is_cut(*found):
            continue
        handle = found[0]
        part = _name(handle, module)
        # Until lazy initialization a unit has its name from where it was sharded.
        unit = shown(handle.full_fqn) if handle.full_fqn else _class_of(handle)
        raise PhaseError(
            f"{type(module).__name__} {shown(part)} was called while fully sharded "
            f"module {unit}, which gathers its parameters, is sharded: it would "
            f"compute with this rank's rows of {shown(join(part, key))}. Call {unit}; "
            f"or, for a method of {unit} that calls its parts, "
            f"register_forward_method(module, name); or make {shown(part)} a fully "
            "sharded module as well, before its parent. Outside the step, "
            "unshard_params(module) shows whole parameters."
        )


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
            return join(handle.full_fqn, place.fqn.rpartition(".")[0])
    return ""
