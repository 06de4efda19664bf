"""Read and write the full value or the full gradient of a single parameter by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_slot
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.flat_parameter import leaf_gradients, set_leaf_gradient
from composable_fsdp.flat.param_form import mesh_groups
from composable_fsdp.flat.param_ref import ParamRef, find_param, param_refs
from composable_fsdp.naming import did_you_mean, listed, quoted, strip_wrapper
from composable_fsdp.runtime.recover import before_shard_write, require_between_steps
from composable_fsdp.tree.root import compare_models, meet_over
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_states, require_module


def get_full_param(module: nn.Module, fqn: str) -> Tensor:
    """Return the full parameter of this name, as in the plain model: a new tensor.

    The tensor has the parameter's dtype, and is on the compute device of every rank.

    Collective: over the shard group a broadcast per rank that holds elements, ``numel``
        elements in all; all its ranks must call. None if the parameter is not sharded.
        Of a parameter that tensor parallelism cuts, an all-gather over its ranks.
    Raises: CompositionError, if ``module`` has no parameter of this name; PhaseError,
        inside forward, backward or ``unshard_params``.

    >>> get_full_param(model, "blocks.0.attn.weight").norm()
    """
    found = find_parameter(module, fqn, "get_full_param")
    if not isinstance(found, ParamRef):
        return found.detach().clone()
    _meet(found, "get_full_param", fqn, always=False)
    compare_models(unit_of(found), replicas=False)
    return gather_slot(found, found.leaf.detach())


@torch.no_grad()
def set_full_param(module: nn.Module, fqn: str, value: Tensor) -> None:
    """Write the full ``value`` into a parameter.

    ``value`` is the same on every rank, in any dtype and on any device.

    Raises: as ``get_full_param``; CompositionError, if the shape differs.
    """
    found = find_parameter(module, fqn, "set_full_param")
    value = _checked(found, fqn, value, "set_full_param")
    if not isinstance(found, ParamRef):
        found.copy_(value)
    else:
        _meet(found, "set_full_param", fqn)
        # A unit that is unsharded now would show the old values: free its full
        # parameters, which forward or backward gathers again.
        before_shard_write(unit_of(found))
        found.leaf.copy_(found.part_of(value))


@torch.no_grad()
def get_full_grad(module: nn.Module, fqn: str) -> Tensor | None:
    """Return a parameter's full reduced gradient; ``None`` without a gradient.

    The result is a new tensor on the compute device.

    Collective: over the shard group an all-reduce of a byte, and if there is a gradient
        a broadcast per rank that holds elements. None if the parameter is not sharded.
    Raises: as ``get_full_param``.
    """
    found = find_parameter(module, fqn, "get_full_grad")
    if not isinstance(found, ParamRef):
        return None if found.grad is None else found.grad.detach().clone()
    _meet(found, "get_full_grad", fqn, always=False)
    handle, leaf = found.handle, found.leaf
    group = handle.groups.shard
    part = leaf_gradients(found.region)[found.index]
    # A rank without elements has no gradient, but takes part in the broadcasts.
    has = torch.tensor([part is not None], device=handle.layout.device).to(torch.uint8)
    # Tensor-parallel ranks ask together, because all of them join the parts below.
    for each in (*(() if group is None else (group,)), *mesh_groups([found.form])):
        collectives.all_reduce(has, each, maximum=True)
    if not has.item():
        return None
    if part is None:
        part = torch.zeros_like(leaf, dtype=found.region.gradient.dtype)
    return gather_slot(found, part.detach())


@torch.no_grad()
def set_full_grad(module: nn.Module, fqn: str, value: Tensor | None) -> None:
    """Set a parameter's full gradient, the same on every rank; ``None`` removes it.

    Raises: as ``set_full_param``; PhaseError, if the parameter is frozen.
    """
    found = find_parameter(module, fqn, "set_full_grad")
    leaf = found.leaf if isinstance(found, ParamRef) else found
    if value is not None:
        value = _checked(found, fqn, value, "set_full_grad")
    if isinstance(found, ParamRef):
        _meet(found, "set_full_grad", fqn)
    if value is not None and not leaf.requires_grad:
        raise PhaseError(
            f"set_full_grad was called for parameter {quoted(fqn)}, which is frozen. "
            "Call requires_grad_() on it first."
        )
    if isinstance(found, ParamRef):
        part = None if value is None else found.part_of(value)
        set_leaf_gradient(found.handle, found.region, found.index, part)
    elif value is None or found.grad is None:
        found.grad = None if value is None else value.to(found, copy=True)
    else:
        found.grad.copy_(value)


def _meet(found: ParamRef, what: str, fqn: str, *, always: bool = True) -> None:
    """Wait until every rank of the unit makes this call. Raises: DesyncError."""
    # Reading sends over the shard group; writing must be the same in the replicas.
    replicas = what.startswith("set")
    call = Call(what, unit_of(found).title, (repr(strip_wrapper(fqn)),))
    meet_over([unit_of(found)], call, replicas=replicas, always=always)


def unit_of(found: ParamRef) -> _FSDPState:
    """Return the unit that holds the parameter."""
    state = _get_module_fsdp_state(found.handle.layout.owners[0])
    assert state is not None
    return state


def find_parameter(module: nn.Module, fqn: str, what: str) -> ParamRef | nn.Parameter:
    """Return the parameter of this name. Raises: CompositionError; PhaseError."""
    require_module(module, what)
    named = module.named_parameters(remove_duplicate=False)
    known = {strip_wrapper(name): parameter for name, parameter in named}
    name = strip_wrapper(fqn)
    if name not in known:
        raise CompositionError(
            f"{what}: {type(module).__name__} has no parameter {fqn!r}"
            f"{did_you_mean(name, known, most=3)}. It has {listed(known)}."
        )
    parameter = known[name]
    # A unit above may hold it.
    ref = find_param(parameter)
    place = None if ref is None else (unit_of(ref), ref.slot.index)
    # By what modules show: full parameters, or one that the user has just assigned.
    for state in _get_fsdp_states(module):
        places = zip(state.handle.layout.places, state.handle.swaps, strict=True)
        for at, (table, key, *_) in places:
            if table.get(key) is parameter:
                place = state, at.slot_index
    if place is None:
        return parameter
    require_between_steps(place[0], what)
    # This may have rebuilt the regions, so the parameter is found by its slot.
    refs = param_refs(place[0].handle)
    return next(ref for ref in refs if ref.slot.index == place[1])


def _checked(
    found: ParamRef | nn.Parameter, fqn: str, value: object, what: str
) -> Tensor:
    """Return ``value`` after a check of shape and device."""
    shape = found.shape if isinstance(found, ParamRef) else tuple(found.shape)
    leaf = found.leaf if isinstance(found, ParamRef) else found
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CompositionError(
            f"{what} expects for parameter {quoted(fqn)} its full shape {shape}, got "
            f"{got}. Pass the whole tensor, the same on every rank."
        )
    if leaf.is_meta:
        raise PhaseError(
            f"{what} was called for parameter {quoted(fqn)}, which is on meta and has "
            "no memory yet. Call model.to_empty(device=...) first."
        )
    return value
