"""Refusing calls of a part of a unit while the unit is sharded.

A part is a module that holds parameters of a unit and has no hooks of that unit. The
forward of a part would compute with this rank's rows, which fits on some ranks and
raises on others. If the unit is not cut (NO_SHARD, ``replicate``), the part would
compute with full weights, but the gradients would bypass the unit, which averages
gradients: such calls are refused if gradients are enabled. A container without a
forward (``nn.ParameterList``) is never called; the module around the container, whose
forward reads the parameters, is the part.

While the unit is sharded, each part has a forward pre-hook that refuses the call;
inside the unit's forward, no part has the pre-hook. So a step pays for a table entry
per part and for no call::

    use_sharded    hooks[REFUSE] = refuse_part      for hooks in handle.guards.tables
    pre_forward    del hooks[REFUSE]

For the same reason torch sees no hook on a part inside the unit's forward: a hook would
keep ``nn.TransformerEncoderLayer`` from its fast path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle, PartGuards
from composable_fsdp.flat.param_form import NO_FORMS, Forms
from composable_fsdp.flat.param_paths import place_path
from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning import walk

REFUSE = -2
"""Key of the refusal among a part's pre-hooks. Torch's own keys start at 0."""


def find_guards(
    groups: Groups,
    owners: Sequence[nn.Module],
    modules: Sequence[nn.Module],
    *,
    forms: Forms = NO_FORMS,
) -> PartGuards:
    """Find the tables of pre-hooks of a unit's parts."""
    # Gradients of experts are sums over other ranks' tokens, also on a single rank.
    if groups.world_size * groups.expert_ranks == 1 and not forms:
        return PartGuards(())
    # A module that owns parameters and has a forward is a part.
    parts = {id(owner): owner for owner in owners}
    without = {key for key, owner in parts.items() if not has_forward(owner)}
    # For containers without a forward, the modules around them are the parts.
    if without:
        parts = {key: each for key, each in parts.items() if key not in without}
        for module in modules:
            parts.update(_readers(module, without))
    for module in modules:
        parts.pop(id(module), None)
    # Torch annotates the tables as dicts, and creates each as an OrderedDict.
    tables = (part._forward_pre_hooks for part in parts.values())
    return PartGuards(tuple([cast("OrderedDict[int, Any]", each) for each in tables]))


def has_forward(module: nn.Module) -> bool:
    """Return whether the module can be called, unlike ``nn.ParameterList``."""
    # ``nn.Module.forward`` is a placeholder that raises. ``forward`` may also be set on
    # the instance. TorchScript classes do not have the attribute.
    method = getattr(type(module), "forward", None)
    return method is not nn.Module.forward or "forward" in vars(module)


def _readers(root: nn.Module, without: set[int]) -> dict[int, nn.Module]:
    """Find the nearest modules with a forward around each container in ``without``."""
    found: dict[int, nn.Module] = {}
    # A walk of its own: a module is entered once for each reader above the module, and
    # names and order do not matter.
    seen: set[tuple[int, int]] = set()
    waiting = [(root, root)]
    while waiting:
        module, reader = waiting.pop()
        if has_forward(module):
            reader = module
        elif id(module) in without:
            found[id(reader)] = reader
        # Several modules may hold the same container, and each of those modules has
        # a forward that reads the parameters.
        if (id(module), id(reader)) not in seen:
            seen.add((id(module), id(reader)))
            below = (child for child in module._modules.values() if child is not None)
            waiting.extend((child, reader) for child in below)
    return found


def refuse_part_calls(handle: FlatParamHandle) -> None:
    """Install the refusal on the unit's parts; for the sharded state."""
    for hooks in handle.guards.tables:
        # Before pre-hooks of the user, which may compute with parameters
        # (``torch.nn.utils.weight_norm`` does).
        hooks[REFUSE] = refuse_part
        hooks.move_to_end(REFUSE, last=False)
    handle.guards.open = False


def refuse_removals(handle: FlatParamHandle) -> None:
    """Refuse ``remove_weight_norm`` and its like, which compute with sharded rows."""
    for owner in handle.layout.owners:
        for hook in owner._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                vars(hook)["remove"] = _refuse_removal


def _refuse_removal(module: nn.Module) -> None:
    """Stand in for ``WeightNorm.remove``. Raises: PhaseError."""
    refs = [ref for p in module.parameters(recurse=False) if (ref := find_param(p))]
    part = f" of unit {refs[0].handle.name}" if refs else ""
    raise PhaseError(
        f"A reparametrization of {type(module).__name__}{part} was to be removed "
        "(remove_weight_norm, remove_spectral_norm, prune.remove), which would compute "
        "with this rank's rows and change the parameters of the unit. Remove it before "
        "fully_shard."
    )


def allow_part_calls(handle: FlatParamHandle) -> None:
    """Remove the refusal from the unit's parts, for a forward."""
    # Backward does not call this function: most backwards call no part, and the
    # pre-hook lets a part pass that shows full leaves.
    for hooks in handle.guards.tables:
        # A user may have cleared the hooks of the module.
        if REFUSE in hooks:
            del hooks[REFUSE]
    handle.guards.open = True


def _refuse_part(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of a part.

    Raises: PhaseError, if a parameter of the module, or of a container without a
    forward in the module, is a sharded leaf that is cut; or is a full parameter whose
    gradient would not be averaged.
    """
    # The unit is found through the parameters and not through a closure, so that a
    # copied or pickled module may keep the hook.
    for path, holder in _holders(module):
        for key, parameter in holder._parameters.items():
            found = find_param(parameter)
            if found is None or parameter is None:
                continue
            handle, cut = found.handle, found.region.layout.world_size > 1
            if not cut:
                # An uncut parameter has correct values; only its gradient would not be
                # averaged.
                trains = torch.is_grad_enabled() and parameter.requires_grad
                if not trains or handle.data_ranks == 1:
                    continue
            place = _name(handle, holder)
            part = place.removesuffix(path).removesuffix(".") if path else place
            made = f"{type(module).__name__} {quoted(part)}"
            raise _refusal(handle, made, quoted(part), quoted(join_name(place, key)))


def _refusal(handle: FlatParamHandle, made: str, part: str, name: str) -> PhaseError:
    """Return the error for the call of a part, because of its parameter ``name``."""
    # Before lazy initialization the FQN is empty for every unit that ``fully_shard``
    # was called on directly; the class name says more.
    unit = f"({handle.layout.plan.class_name})"
    if handle.full_fqn:
        unit = quoted(handle.full_fqn)
    if handle.layout.regions[0].layout.world_size > 1:
        where = f"while fully sharded module {unit}, which gathers its parameters, is "
        where += f"sharded: it would compute with this rank's rows of {name}"
        way = "Outside the step, unshard_params(module) shows whole parameters."
    else:
        where = f"outside the forward of module {unit}, which averages gradients over "
        where += f"{handle.data_ranks} ranks: that of {name} would be this rank's alone"
        way = "Without gradients, call it under torch.no_grad()."
    return PhaseError(
        f"{made} was called {where}. Call {unit}; or, for a method of {unit} that "
        f"calls its parts, register_forward_method(module, name); or make {part} a "
        f"fully sharded module as well, before its parent. {way}"
    )


def _holders(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules: the module and its containers without a forward."""
    return walk.named(
        module,
        enter=lambda each: each is module or not has_forward(each),
        every_path=True,
    )


# Dynamo must not trace the pre-hook, which reads Python registries.
refuse_part: Any = vars(torch)["_disable_dynamo"](_refuse_part)
# A pickled module stores hooks by name, so the wrapped function needs a name.
refuse_part.__module__, refuse_part.__qualname__ = __name__, "refuse_part"


def _name(handle: FlatParamHandle, module: nn.Module) -> str:
    """Return the FQN of ``module``, by the first of its places in the unit."""
    for at, place in enumerate(handle.layout.places):
        if handle.layout.owners[at] is module:
            path = place_path(handle, at)
            return path.removesuffix(place.name).removesuffix(".")
    return ""
