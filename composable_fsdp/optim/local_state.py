"""Save and load this rank's shards of optimizer state under an equal plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.keys import aligned_groups
from composable_fsdp.optim.names import Named
from composable_fsdp.optim.own_state_dict import joined_state
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.local import (
    PLAN,
    LocalValue,
    as_local,
    plans_of,
    require_plan,
)
from composable_fsdp.tree.traversal import _get_fsdp_states, walk_states


def local_state(
    model: nn.Module,
    optims: Sequence[torch.optim.Optimizer],
    given: Sequence[dict[str, Any]],
    *,
    to_cpu: bool,
) -> dict[str, Any]:
    """Return this rank's shards of the state, keyed by name, and the units' plans.

    Tensors share the optimizer's memory, unless ``to_cpu`` copies them to the host.

    Returns: ``{"state": ..., "param_groups": ..., PLAN: plans}``.

    Raises: CheckpointError, as ``state_by_name``; PhaseError, inside a step.
    """
    # Raise on this rank alone: no collective follows, so no other rank waits.
    for state in _get_fsdp_states(model):
        require_between_steps(state, "optim_state_dict")
    groups, joined, own = joined_state(model, optims, given, "optim_state_dict")
    result = {
        named.fqn: {
            key: _shown(named, value, to_cpu=to_cpu)
            for key, value in joined["state"][named.fqn].items()
        }
        for members in groups
        for named in members
        if named.fqn in joined["state"]
    }
    return {
        "state": result,
        "param_groups": aligned_groups(groups, joined, own),
        PLAN: plans_of(model),
    }


def _shown(named: Named, value: Any, *, to_cpu: bool) -> Any:
    """Return a state value as a ``LocalValue`` if this rank holds only a part."""
    if not isinstance(value, Tensor):
        return value
    # State of a parameter that every rank holds whole is no part.
    is_part = named.is_cut and value.shape == named.parameter.shape
    # torch.distributed.checkpoint would take a plain tensor for a value that is equal
    # on all ranks. A ``LocalValue`` makes that package raise.
    return as_local(named.handle if is_part else None, value, to_cpu=to_cpu)


def require_plans(model: nn.Module, saved: dict[str, Any]) -> None:
    """Refuse local state of another plan. Raises: CheckpointError, naming the unit."""
    plans = saved.get(PLAN) if isinstance(saved, dict) else None
    for fqn, _, state in walk_states(model):
        require_plan(state.handle, plans.get(fqn) if isinstance(plans, dict) else None)


def local_part(named: Named, name: str, value: Any) -> Any:
    """Return a copy of this rank's state ``value``, which must fit the parameter.

    Returns: a new tensor; ``value`` itself if it is no tensor.

    Raises: CheckpointError, for state of a cut parameter that is neither a scalar nor
    of this rank's shape.
    """
    if isinstance(value, LocalValue):
        value = value.plain()
    if not isinstance(value, Tensor):
        return value
    # State of a parameter that this rank holds whole may have any shape.
    if not named.is_cut or value.ndim == 0 or value.shape == named.parameter.shape:
        # Clone the value, which may be memory of the optimizer that was saved.
        return value.clone()
    raise CheckpointError(
        f"Optimizer state {name!r} of {quoted(named.fqn)} has shape "
        f"{tuple(value.shape)}; expected a scalar or this rank's shard, "
        f"{tuple(named.parameter.shape)}."
    )
