"""One parameter by its name: its full value and its gradient, read and written.

Only that parameter is sent, each part once by the rank that holds it. Writing sends
nothing, because every rank passes the whole value. Names are the plain model's; a tied
parameter answers to each of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_slot
from composable_fsdp.comm import collectives
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.flat_parameter import leaf_gradients, set_leaf_gradient
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import join_name, quoted, strip_wrapper
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.runtime.recover import free_all_full_params, require_between_steps
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import require_module, walk_states


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as a unit holds it."""

    state: _FSDPState
    region: FlatParameter
    slot: ParameterSlot
    leaf: nn.Parameter

    @property
    def handle(self) -> FlatParamHandle:
        """The handle of its unit."""
        return self.state.handle


def get_full_param(module: nn.Module, fqn: str) -> Tensor:
    """Return the parameter of that name as in the plain model: a new tensor.

    In the parameter's own dtype, on the device that computes, on every rank.

    Collective: one broadcast of each rank's part, ``numel`` elements in all, over the
    shard group; all its ranks must call. None if nothing is cut.
    Raises: CompositionError, for a name that ``module`` does not have; PhaseError,
    inside forward, backward or ``unshard_params``.

    >>> get_full_param(model, "blocks.0.attn.weight").norm()
    """
    found = find_parameter(module, fqn, "get_full_param")
    if not isinstance(found, Held):
        return found.detach().clone()
    return gather_slot(found.handle, found.region, found.slot, found.leaf.detach())


@torch.no_grad()
def set_full_param(module: nn.Module, fqn: str, value: Tensor) -> None:
    """Write the full ``value`` of the parameter of that name; each rank its part.

    Every rank passes the same; ``value`` may be of another dtype or device. Sends
    nothing.
    Raises: as ``get_full_param``; CompositionError, for another shape.
    """
    found = find_parameter(module, fqn, "set_full_param")
    value = _checked(found, fqn, value, "set_full_param")
    if not isinstance(found, Held):
        found.copy_(value)
    else:
        free_all_full_params(found.state)
        found.leaf.copy_(own_part(found, value))


@torch.no_grad()
def get_full_grad(module: nn.Module, fqn: str) -> Tensor | None:
    """Return the reduced gradient of that parameter, whole; ``None`` if there is none.

    Between backward and ``zero_grad``. A new tensor, as ``get_full_param``'s.

    Collective: one all-reduce of a byte over the shard group, and if there is a
    gradient one broadcast of each rank's part. None if nothing is cut.
    Raises: as ``get_full_param``.
    """
    found = find_parameter(module, fqn, "get_full_grad")
    if not isinstance(found, Held):
        return None if found.grad is None else found.grad.detach().clone()
    handle, leaf = found.handle, found.leaf
    group = handle.groups.shard
    part = leaf_gradients(found.region, handle)[_index(found)]
    has = torch.tensor([part is not None], device=handle.device).to(torch.uint8)
    if group is not None:
        collectives.all_reduce(has, group, maximum=True)
    if not has.item():
        return None
    if part is None:
        part = torch.zeros_like(leaf, dtype=found.region.grad_dtype)
    return gather_slot(handle, found.region, found.slot, part.detach())


@torch.no_grad()
def set_full_grad(module: nn.Module, fqn: str, value: Tensor | None) -> None:
    """Make the full ``value`` the gradient of that parameter; ``None`` takes it away.

    Every rank passes the same. Sends nothing.
    Raises: as ``set_full_param``; PhaseError, if the parameter is frozen.
    """
    found = find_parameter(module, fqn, "set_full_grad")
    leaf = found.leaf if isinstance(found, Held) else found
    if value is None:
        _set_grad(found, None)
        return
    value = _checked(found, fqn, value, "set_full_grad")
    if not leaf.requires_grad:
        raise PhaseError(
            f"set_full_grad was called for parameter {quoted(fqn)}, which is frozen. "
            "Call requires_grad_() on it first."
        )
    _set_grad(found, own_part(found, value) if isinstance(found, Held) else value)


def _set_grad(found: Held | nn.Parameter, part: Tensor | None) -> None:
    if isinstance(found, Held):
        set_leaf_gradient(found.handle, found.region, _index(found), part)
    elif part is None or found.grad is None:
        found.grad = None if part is None else part.to(found, copy=True)
    else:
        found.grad.copy_(part)


def _index(found: Held) -> int:
    """Its number among the leaves of its region."""
    return found.region.layout.parameters.index(found.slot)


def find_parameter(module: nn.Module, fqn: str, what: str) -> Held | nn.Parameter:
    """The parameter of that name, settled, as its unit holds it; itself if none does.

    Sends nothing. Raises: CompositionError, with names that are close; PhaseError.
    """
    require_module(module, what)
    name = strip_wrapper(fqn)
    known = []
    for prefix, _, state in walk_states(module):
        for region in state.handle.regions:
            for index, slot in enumerate(region.layout.parameters):
                names = [join_name(prefix, each) for each in slot.fqns]
                known += names
                if name in names:
                    return _settled(state, region, index, what)
    for other, parameter in module.named_parameters(remove_duplicate=False):
        if strip_wrapper(other) == name:
            found = find_leaf(parameter)
            if found is None:
                return parameter
            # Under a name of its own, which an override gave it.
            owner = next(s for _, _, s in walk_states(module) if s.handle is found[0])
            region, index = region_of(*found)
            return _settled(owner, region, index, what)
        known.append(strip_wrapper(other))
    raise CompositionError(
        f"{what}: {type(module).__name__} has no parameter {fqn!r}. "
        f"{closest_names(name, known)}"
    )


def closest_names(name: str, known: Iterable[str]) -> str:
    """A sentence with the names like ``name``, or with how many there are."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"Close to it are {', '.join(map(repr, near))}."
    return f"It has {len(known)}; the first are {known[:3]}."


def _settled(state: _FSDPState, region: FlatParameter, index: int, what: str) -> Held:
    require_between_steps(state, what)
    # Settling may have laid the regions out anew.
    slot_index = region.layout.parameters[index].index
    for each in state.handle.regions:
        for slot, leaf in zip(each.layout.parameters, each.leaves, strict=True):
            if slot.index == slot_index:
                return Held(state, each, slot, leaf)
    raise AssertionError(f"unit {state.name} lost a parameter")


def region_of(handle: FlatParamHandle, index: int) -> tuple[FlatParameter, int]:
    """The region of the unit's leaf number ``index``, and its number there."""
    for region in handle.regions:
        if index < len(region.leaves):
            return region, index
        index -= len(region.leaves)
    raise AssertionError(f"unit {handle.name} has no leaf {index}")


def own_part(held: Held, value: Tensor) -> Tensor:
    """This rank's part of the full ``value``, in the shape of the leaf."""
    start, stop = held.region.layout.interval(held.slot, held.region.rank)
    return value.detach().reshape(-1)[start:stop].view(held.leaf.shape)


def _checked(found: Held | nn.Parameter, fqn: str, value: object, what: str) -> Tensor:
    shape = found.slot.shape if isinstance(found, Held) else tuple(found.shape)
    leaf = found.leaf if isinstance(found, Held) else found
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
