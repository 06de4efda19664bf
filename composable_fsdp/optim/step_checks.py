"""Optimizers whose step on a shard is not their step on the whole parameter.

An element-wise optimizer may step on any part of a parameter. One that looks at a whole
matrix, at norms, or at all parameters at once may not, and would differ without a word.
It is refused at its first step, before it changes anything, and where its state is
asked for. Parameters that every rank holds whole (``NO_SHARD``, ``replicate``, ignored
ones, one rank) are nobody's part, and any optimizer trains them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import (
    FlatParamRecord,
    find_flat,
    flats_in,
    move_own_gradients,
)
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.optim.names import Group, place_of

_REASONS: Final = {
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "scales by means over rows, columns and whole parameters",
    "LBFGS": "takes inner products over all parameters together",
    "SparseAdam": "takes sparse gradients, and reduced ones are dense",
    "Lamb": "scales by norms of whole parameters",
    "LAMB": "scales by norms of whole parameters",
    "LARS": "scales by norms of whole parameters",
    "Shampoo": "preconditions whole matrices",
    "SOAP": "preconditions whole matrices",
}
"""By class name, because most of them are not torch's; subclasses count as well."""


def needs_whole_params(optim: object) -> str:
    """Why ``optim`` cannot step on parts; empty if nothing speaks against it.

    A class that was made for shards says ``works_on_shards = True``.
    """
    if getattr(optim, "works_on_shards", False):
        return ""
    names = (kind.__name__ for kind in type(optim).__mro__)
    return next((_REASONS[name] for name in names if name in _REASONS), "")


def require_elementwise(optim: object) -> None:
    """Refuse an optimizer that needs whole parameters and holds parts of some.

    Sends nothing. Raises: CompositionError, on all ranks alike.
    """
    reason = needs_whole_params(optim)
    if not reason:
        return
    groups: Iterable[dict[str, Any]] = getattr(optim, "param_groups", ())
    for parameter in (p for group in groups for p in group["params"]):
        joined = find_flat(parameter)
        if joined is not None:
            raise CompositionError(
                f"{type(optim).__name__} {reason}, and {flat_name(*joined)} joins what "
                "this rank holds of several: its step would not be that of the whole "
                "model. Use an element-wise optimizer (SGD, Adam, AdamW, ...) for it, "
                "or give this one original parameters that are kept whole: "
                "replicate(module), strategy=ShardingStrategy.NO_SHARD, or "
                "ignored_states."
            )
        found = cut_leaf(parameter)
        if found is not None:
            raise CompositionError(
                f"{type(optim).__name__} {reason}, and of {leaf_name(*found)} each "
                "rank holds a part only: its step would not be that of the whole "
                "model. Use an element-wise optimizer (SGD, Adam, AdamW, ...) for it, "
                "or keep it whole: replicate(module), "
                "strategy=ShardingStrategy.NO_SHARD, or ignored_states."
            )


def cut_leaf(parameter: object) -> tuple[FlatParamHandle, int] | None:
    """The unit of a parameter that is cut over ranks, and its place; None if whole."""
    found = find_leaf(parameter)
    return found if found is not None and found[0].groups.shard is not None else None


def leaf_name(handle: FlatParamHandle, index: int) -> str:
    """How messages call a leaf of ``handle``."""
    return quoted(join_name(handle.full_fqn, handle._fqns[index]))


def flat_name(handle: FlatParamHandle, flat: FlatParamRecord) -> str:
    """How messages call a flat parameter of ``handle``."""
    slots = flat.layout.parameters
    names = ", ".join(quoted(join_name(handle.full_fqn, s.fqn)) for s in slots[:3])
    more = f" and {len(slots) - 3} more" if len(slots) > 3 else ""
    return f"the flat parameter of {names}{more}"


def prepare_flats(optim: torch.optim.Optimizer) -> None:
    """Give flat parameters all of their gradient; every step, one look-up for each.

    Raises: CompositionError, for one that was retired.
    """
    flats = flats_in(optim.param_groups)
    for flat in flats:
        handle = flat()
        if flat.region is None and handle is not None:
            raise CompositionError(
                f"{type(optim).__name__} holds {flat_name(handle, flat)}, of which "
                "some were frozen or unfrozen since: they have no flat gradient in "
                "common any more. Make a new optimizer of flat_parameters(module), "
                "and bring the state along by optim_state_dict(module, optimizer)."
            )
    move_own_gradients(flats)


def require_no_flat_originals(optim: torch.optim.Optimizer) -> None:
    """Refuse originals whose gradients go to a flat parameter.

    Raises: CompositionError.
    """
    for parameter in (p for group in optim.param_groups for p in group["params"]):
        found = find_leaf(parameter)
        if found is not None and place_of(*found)[0].flat is not None:
            raise CompositionError(
                f"{type(optim).__name__} holds {leaf_name(*found)}, of which "
                "flat_parameters(module) has handed out the flat parameter: that gets "
                "the gradient, and this optimizer would step on nothing, or on the "
                "same elements again. Make it of flat_parameters(module), or of "
                "module.parameters() and never call flat_parameters."
            )


def require_own_state(optim: torch.optim.Optimizer) -> None:
    """Refuse state that is not of the shards, as far as shapes tell.

    Raises: CompositionError.
    """
    for parameter, values in optim.state.items():
        if not isinstance(values, dict):
            continue
        flat = find_flat(parameter)
        if flat is not None:
            _require_flat_state(optim, parameter, values, flat_name(*flat))
            continue
        found = cut_leaf(parameter)
        if found is None:
            continue
        whole = place_of(*found)[1].shape
        for key, value in values.items():
            # One element is a counter; for those it cannot be said.
            if (
                not isinstance(value, Tensor)
                or value.numel() == 1
                or value.shape == parameter.shape
            ):
                continue
            who = f"{type(optim).__name__}'s state {key!r} of {leaf_name(*found)}"
            if tuple(value.shape) == whole:
                raise CompositionError(
                    f"{who} has the full shape {whole}; expected this rank's shard, "
                    f"{tuple(parameter.shape)}. It was made before fully_shard, or "
                    "loaded from a plain model. Bring it along: take "
                    "state = optim_state_dict(model, optim) while the model is still "
                    "plain, and after fully_shard call optim_state_dict_to_load("
                    "model, optim, state, load_directly=True); or make the optimizer "
                    "after fully_shard."
                )
            raise CompositionError(
                f"{who} has shape {tuple(value.shape)}; expected a scalar or this "
                f"rank's shard, {tuple(parameter.shape)}. State that is not "
                "element-wise is another one on each rank. Use an element-wise "
                "optimizer, or keep the parameter whole: replicate(module), "
                "strategy=ShardingStrategy.NO_SHARD, or ignored_states."
            )


def _require_flat_state(
    optim: torch.optim.Optimizer, parameter: Tensor, values: Group, name: str
) -> None:
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.numel() == 1:
            continue
        if value.shape != parameter.shape:
            raise CompositionError(
                f"{type(optim).__name__}'s state {key!r} of {name} has shape "
                f"{tuple(value.shape)}; expected a scalar or this rank's shard, "
                f"{tuple(parameter.shape)}. State that is not element-wise cannot be "
                "told apart by parameters. Use an element-wise optimizer."
            )
