"""Refusing calls of a part of a unit while the unit is sharded.

A part holds parameters of a unit and has no hooks of that unit, so its forward would
compute with this rank's rows. A pre-hook refuses it until the unit's forward, in which
torch sees no hook that would keep it from a fast path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle, Guards
from composable_fsdp.flat.param_form import Forms
from composable_fsdp.flat.param_ref import ParamRef, find_param, place_path
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning import walk
from composable_fsdp.planning.walk import has_forward

REFUSE = -2
"""Key of the refusal among a part's pre-hooks. Torch's own keys start at 0."""


def find_guards(
    groups: Groups,
    owners: Sequence[nn.Module],
    modules: Sequence[nn.Module],
    forms: Forms,
) -> Guards:
    """Return the tables of pre-hooks of a unit's parts, without refusals."""
    if groups.world_size == 1 and not forms:
        return ()
    parts = dict(zip(map(id, owners), owners, strict=True))
    without = {key for key, owner in parts.items() if not has_forward(owner)}
    if without:
        parts = {key: each for key, each in parts.items() if key not in without}
        parts |= {
            id(each): each
            for module in modules
            for each in walk.modules(module)
            if has_forward(each)
            and any(id(holder) in without for _, holder in _read_by(each))
        }
    for module in modules:
        parts.pop(id(module), None)
    # Torch annotates the tables as dicts, and creates each as an OrderedDict.
    tables: list[Any] = [part._forward_pre_hooks for part in parts.values()]
    return tuple(tables)


def _read_by(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module``, and containers without a forward in it, with their paths."""
    return walk.named(
        module,
        enter=lambda each: each is module or not has_forward(each),
        every_path=True,
    )


def refuse_part_calls(handle: FlatParamHandle) -> None:
    """Install the refusal on the unit's parts; for the sharded state."""
    for hooks in handle.guards:
        alone = not hooks
        hooks[REFUSE] = refuse_part
        # Before pre-hooks of the user, which may compute with parameters
        # (``torch.nn.utils.weight_norm`` does).
        if not alone:
            hooks.move_to_end(REFUSE, last=False)


def allow_part_calls(handle: FlatParamHandle) -> None:
    """Remove the refusal from the unit's parts, for a forward."""
    for hooks in handle.guards:
        hooks.pop(REFUSE, None)  # a user may have cleared the hooks of a module


def refuse_removals(owners: Sequence[nn.Module]) -> None:
    """Refuse ``remove_weight_norm`` and its like, which read beyond sharded rows."""
    for owner in owners:
        hooks = owner._forward_pre_hooks
        for hook in hooks.values() if hooks else ():
            # Torch undoes its reparametrizations by a method of their pre-hooks.
            if type(hook).__module__.startswith("torch.nn.utils."):
                vars(hook)["remove"] = _refuse_removal


def _refuse_removal(module: nn.Module) -> None:
    """Stand in for ``WeightNorm.remove``. Raises: PhaseError."""
    raise PhaseError(
        f"A reparametrization of {type(module).__name__}, which is in a fully sharded "
        "module, was to be removed (remove_weight_norm, remove_spectral_norm, "
        "prune.remove): that would compute with this rank's rows. Remove it before "
        "fully_shard."
    )


def _refuse_part(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of a part, which may hold tensors of ``functional_call``."""
    # The unit is found through the parameters and not through a closure, so that a
    # copied or pickled module may keep the hook.
    for path, holder in _read_by(module):
        for key, parameter in holder._parameters.items():
            found = find_param(parameter)
            if found is None or parameter is None:
                continue
            if found.region.layout.world_size == 1:
                # The values are right, and only the gradient would not be averaged.
                trains = torch.is_grad_enabled() and parameter.requires_grad
                if not trains or found.handle.data_ranks == 1:
                    continue
            raise _refusal(found, module, path, holder, key)


def _refusal(
    ref: ParamRef, module: nn.Module, path: str, holder: nn.Module, key: str
) -> PhaseError:
    """Return the error for the call of a part, because of a parameter of ``holder``."""
    handle, layout = ref.handle, ref.handle.layout
    place = ""
    for at, owner in enumerate(layout.owners):
        if owner is holder:
            place = place_path(handle, at).removesuffix(layout.keys[at])[:-1]
            break
    name = quoted(join_name(place, key))
    part = quoted(place.removesuffix(path).removesuffix("."))
    # Before lazy initialization the FQN is empty for every unit that ``fully_shard``
    # was called on directly; the class name says more.
    unit = handle.name if handle.full_fqn else f"({layout.plan.class_name})"
    if ref.region.layout.world_size > 1:
        where = f"while fully sharded module {unit}, which gathers its parameters, is "
        where += f"sharded: it would compute with this rank's rows of {name}"
        way = "Outside the step, unshard_params(module) shows whole parameters."
    else:
        where = f"outside the forward of module {unit}, which averages gradients over "
        where += f"{handle.data_ranks} ranks: that of {name} would be this rank's alone"
        way = "Without gradients, call it under torch.no_grad()."
    return PhaseError(
        f"{type(module).__name__} {part} was called {where}. Call {unit}; or, for a "
        f"method of {unit} that calls its parts, register_forward_method(module, name);"
        f" or make {part} a fully sharded module as well, before its parent. {way}"
    )


# Dynamo must not trace the pre-hook, which reads Python registries.
refuse_part: Any = vars(torch)["_disable_dynamo"](_refuse_part)
# A pickled module stores hooks by name, so the wrapped function needs a name.
refuse_part.__module__, refuse_part.__qualname__ = __name__, "refuse_part"
