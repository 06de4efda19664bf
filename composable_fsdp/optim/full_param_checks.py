"""Refuse optimizers that hold full parameters or step while full parameters are shown.

``unshard``, ``unshard_params`` and a forward put full parameters into the modules for a
while. Two mistakes with them would silently train nothing; both raise at the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from composable_fsdp.access.unsharded_unit import UNSHARDED
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.param_ref import originals_by_vars
from composable_fsdp.naming import listed
from composable_fsdp.optim.step_checks import flat_name, leaf_name
from composable_fsdp.phases import Phase


def parameters_of(optim: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [p for group in optim.param_groups for p in group["params"]]


def handles_of(optim: torch.optim.Optimizer) -> list[FlatParamHandle]:
    """Return the units whose parameters or flat parameters ``optim`` holds."""
    owners = (find_leaf(p) or find_flat(p) for p in parameters_of(optim))
    return list({id(owner[0]): owner[0] for owner in owners if owner}.values())


def require_outside_unshard_params(optim: torch.optim.Optimizer) -> None:
    """Refuse a step on sharded parameters while ``unshard_params`` shows the full ones.

    Raises: PhaseError, on all ranks alike, before any parameter has changed.
    """
    # The end of the block writes the full values into the shards and would undo the
    # step.
    if not UNSHARDED:
        return
    for parameter in parameters_of(optim):
        leaf, flat = find_leaf(parameter), find_flat(parameter)
        found = leaf or flat
        if found is None or found[0].phase is not Phase.SUMMON:
            continue
        name = leaf_name(*leaf) if leaf else flat_name(*flat) if flat else ""
        raise PhaseError(
            f"{type(optim).__name__}.step() was called inside unshard_params, which "
            f"shows {name} full; the end of the block would write the full values over "
            "the step. Call it after the block."
        )


def steps_on_full_params(optim: torch.optim.Optimizer) -> bool:
    """Return whether ``optim`` steps on full parameters that have gradients.

    ``unshard_params(module, with_grads=True)`` shows such parameters, and the end of
    the block keeps their new values. Other full parameters are refused, because they
    never get a gradient.

    Raises: CompositionError, on the ranks that hold some, before any parameter has
    changed.
    """
    strangers = [p for p in parameters_of(optim) if not (find_leaf(p) or find_flat(p))]
    if not strangers:
        return False
    # Full and sharded parameter share a ``__dict__``, for every dtype and for every
    # block of ``unshard_params``; so find the owner by the identity of the
    # ``__dict__``.
    originals = originals_by_vars()
    found = [
        (p, *originals[key]) for p in strangers if (key := id(_vars(p))) in originals
    ]
    if not found:
        return False
    # Only a block with ``with_grads=True`` gives gradients to full parameters.
    if all(handle.phase is Phase.SUMMON for _, handle, _ in found) and any(
        p.grad is not None for p, *_ in found
    ):
        return True
    names = listed(leaf_name(handle, i) for _, handle, i in found)
    raise CompositionError(
        f"{type(optim).__name__} holds the full parameters of {names}, which "
        "modules showed when it was given them (inside unshard_params, after unshard, "
        "or inside a forward); expected the sharded ones, which get the gradients: "
        "its steps would change nothing. Make the optimizer of module.parameters() "
        "after the block, or after reshard(module)."
    )


def _vars(parameter: Any) -> object:
    """Return the ``__dict__`` of a parameter, None without."""
    return getattr(parameter, "__dict__", None)
