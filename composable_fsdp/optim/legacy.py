"""FSDP1's older functions for optimizer state: a function per state type and step.

The name of each function decides the state dict type; ``set_state_dict_type`` has no
effect on these functions. ``model`` is the sharded model, or a module that contains it.
``optim_input`` has the parameters or groups of an optimizer that does not exist yet; it
is used only where ``optim`` is None. Default: a single group of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable_fsdp.optim.load import state_to_load
from composable_fsdp.optim.names import groups_of, meet_for_state, require_pair
from composable_fsdp.optim.own_state_dict import local_state_dict
from composable_fsdp.optim.save import full_state, sharded_state
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.tree.traversal import _get_fsdp_states


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Iterable[Any] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return full state on the CPU, by names; ``{}`` elsewhere with ``rank0_only``.

    ``optim_input`` and ``group`` are ignored. Collective, Raises: as
    ``optim_state_dict`` for the full type.
    """
    given = _own_state(model, optim, "full_optim_state_dict", first_only=rank0_only)
    return full_state(model, [optim], [given], first_only=rank0_only, to_cpu=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return a state dict to load, of a state that every rank holds in full."""
    what = "shard_full_optim_state_dict"
    return _to_load(full_optim_state_dict, model, optim, optim_input, what)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return a state dict to load, of a full state that only the first rank holds.

    Other ranks may pass None. ``group``: the ranks that take part; default: the ranks
    of the model.

    Collective: one broadcast of the structure, one all-gather of error texts, and one
        broadcast per tensor, over ``group``; all its ranks must call.
    Raises: as ``optim_state_dict_to_load``, on all ranks alike.
    """
    saved, what = full_optim_state_dict, "scatter_full_optim_state_dict"
    how = {"from_first": True, "group": group}
    return _to_load(saved, model, optim, optim_input, what, **how)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the state as copies in sharded values, by names; ``group`` is ignored.

    Collective, Raises: as ``optim_state_dict`` for the sharded type.
    """
    given = _own_state(model, optim, "sharded_optim_state_dict")
    return sharded_state(model, [optim], [given], to_cpu=False)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return a state dict to load, of a state in sharded values.

    Collective, Raises: as ``optim_state_dict_to_load``.
    """
    what = "flatten_sharded_optim_state_dict"
    require_pair(model, optim, what)
    return _to_load(sharded_optim_state_dict, model, optim, None, what)


def _own_state(
    model: nn.Module, optim: Optimizer, what: str, *, first_only: bool = False
) -> dict[str, Any]:
    """Return the optimizer's own state, after all ranks have called ``what``."""
    require_pair(model, optim, what)
    meet_for_state(_get_fsdp_states(model), what, first_only=first_only)
    return local_state_dict(optim)


def _to_load(
    saved: Any, model: nn.Module, optim: Any, optim_input: Any, what: str, **how: Any
) -> dict[str, Any]:
    """Return this rank's part of a state, for a single optimizer."""
    groups = [groups_of(model, optim, optim_input, what)]
    # The optimizer may get state before its first step.
    install_optimizer_hooks(optim)
    (result,) = state_to_load(model, groups, saved, what=what, **how)
    return result
