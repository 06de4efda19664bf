"""The three places where the door of FSDP2 changes torch, so that scripts may stay.

``clip_grad_norm_``, ``GradScaler`` and attributes of DTensors, at the first
``fully_shard`` of the door. Private: the closure's variable ``func`` of the first, and
``GradScaler._unscale_grads_`` (checked on torch 2.13).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.access.grads import clip_grad_norm_ as own_clip
from composable_fsdp.doors.fsdp2_module import FSDPModule
from composable_fsdp.features.grad_scaler import ShardedGradScaler, unscale_together
from composable_fsdp.flat.handle import LEAVES, FlatParamHandle, find_leaf
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.flat.param_ref import param_ref
from composable_fsdp.naming import quoted
from composable_fsdp.tree.state import _get_module_fsdp_state

_OF_DTENSORS = ("full_tensor", "placements", "device_mesh", "to_local")
"""Attributes of DTensor parameters that scripts read."""
_MARK = "_composable_fsdp"
"""An attribute of what is changed already; others may use ``wraps`` as well."""


def change_torch() -> None:
    """Install the changes; a second call does nothing."""
    for name in _OF_DTENSORS:
        if name not in vars(nn.Parameter):
            # A property that raises, so ``hasattr`` stays False. DTensor parameters are
            # of another class, and keep their attributes.
            setattr(nn.Parameter, name, property(partial(_advise, name)))
    function: Any = torch.nn.utils.clip_grad_norm_
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cell = function.__closure__[names.index("func")] if "func" in names else None
    if cell is not None and not hasattr(cell.cell_contents, _MARK):
        cell.cell_contents = _clip_by_kind(cell.cell_contents)
    scaler: Any = torch.amp.GradScaler
    if not hasattr(scaler._unscale_grads_, _MARK):
        scaler._unscale_grads_ = _unscale_by_kind(scaler._unscale_grads_)


def _clip_by_kind(plain: Any) -> Any:
    """Return a function that clips sharded parameters by their norm over all ranks."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # Equal on all ranks, also on a rank that has no row of a parameter.
        if not any(map(_is_of_the_door, given)):
            return plain(given, *args, **kwargs)
        # By name, so that an argument that torch adds raises and is not mistaken.
        bound = dict(signature.bind(given, *args, **kwargs).arguments)
        return own_clip(bound.pop("parameters"), **bound)

    setattr(clip, _MARK, True)
    return clip


def _unscale_by_kind(plain: Any) -> Any:
    """Return a method that unscales, and asks all ranks of a unit for infs."""

    @functools.wraps(plain)
    def unscale(
        self: Any, optim: Any, scale: Tensor, found_inf: Tensor, *more: Any
    ) -> Any:
        torchs = partial(plain, self, optim, scale, found_inf, *more)
        # ``ShardedGradScaler`` calls this method, too, and asks the ranks itself.
        if isinstance(self, ShardedGradScaler):
            return torchs()
        # Equal on all ranks, as the optimizers are.
        groups = [
            each
            for group in optim.param_groups
            for handle in map(_handle_of_the_door, group["params"])
            if handle is not None
            # A rank of tensor parallelism may be the only one with an inf.
            for each in (handle.groups.shard, *groups_of(handle.layout.forms))
        ]
        # Optimizers of plain models step as without this package.
        if not groups:
            return torchs()
        return unscale_together(optim, torchs, found_inf, list(dict.fromkeys(groups)))

    setattr(unscale, _MARK, True)
    return unscale


def _is_of_the_door(parameter: Tensor) -> bool:
    """Return whether a unit that the door has sharded holds ``parameter``."""
    return _handle_of_the_door(parameter) is not None


def _handle_of_the_door(parameter: Tensor) -> FlatParamHandle | None:
    """Return the unit of ``parameter``, if the door has sharded it."""
    found = find_leaf(parameter) if id(parameter) in LEAVES else None
    if found is None:
        return None
    # The class of the module tells, also of a copied module. Any owner will do: all
    # modules of a unit share its state.
    state = _get_module_fsdp_state(found[0].layout.owners[0])
    of_the_door = state is not None and isinstance(state.module, FSDPModule)
    return found[0] if of_the_door else None


def _advise(attribute: str, parameter: nn.Parameter) -> None:
    """Raise AttributeError, for a sharded parameter with the way out."""
    text = f"{type(parameter).__name__!r} object has no attribute {attribute!r}"
    # Parameters of other models get Python's own text.
    found = find_leaf(parameter) if id(parameter) in LEAVES else None
    if found is not None:
        name = quoted(param_ref(*found).name)
        text += (
            f". It holds this rank's rows of {name} as a plain "
            "tensor and is no DTensor: ask isinstance(parameter, DTensor) first. The "
            "whole is composable_fsdp.get_full_param(model, name) (get_full_grad for "
            "its gradient), or full_tensor() of the value that model.state_dict() gives"
        )
    raise AttributeError(text)
