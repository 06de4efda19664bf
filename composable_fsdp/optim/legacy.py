"""FSDP1's older functions for optimizer state: a function per state type and step.

The name of each function decides the state dict type; ``set_state_dict_type`` has no
effect on these functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.consensus import raise_on_all_ranks
from composable_fsdp.optim.load import state_to_load
from composable_fsdp.optim.names import Group, groups_of, require_pair
from composable_fsdp.optim.own_state_dict import local_state_dict
from composable_fsdp.optim.save import full_state, sharded_state
from composable_fsdp.optim.units import meet_for_state, shard_groups, units_known


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Iterable[Any] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return full state on the CPU; ``{}`` on other ranks with ``rank0_only``.

    Args:
        model: the sharded model, or a module that contains the sharded model.
        optim: the optimizer.
        optim_input: ignored; accepted because FSDP1 has this argument.
        rank0_only: return the state on the first rank only; default: True.
        group: ignored; accepted because FSDP1 has this argument.

    Returns: the state keyed by names, or ``{}``.

    Collective: as ``optim_state_dict`` for the full type; all ranks must call.
    Raises: as ``optim_state_dict``.
    """
    given = _own_state(model, optim, "full_optim_state_dict", first_only=rank0_only)
    return full_state(model, [optim], [given], first_only=rank0_only, to_cpu=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a state that every rank holds in full.

    Args:
        full_optim_state_dict: the full state; equal on all ranks.
        model: the sharded model, or a module that contains the sharded model.
        optim_input: parameters or groups of an optimizer that does not exist yet; used
            only without ``optim``. Default: a single group of all parameters.
        optim: the optimizer; default: use ``optim_input``.

    Returns: a state dict for ``optim.load_state_dict``.

    Raises: as ``optim_state_dict_to_load``.
    """
    # The name goes into the error of a rank that calls alone.
    what = "shard_full_optim_state_dict"
    groups = partial(_groups, model, optim, optim_input, what)
    units = units_known(model, optim)
    (result,) = state_to_load(units, model, groups, full_optim_state_dict, what=what)
    return result


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a state that only the first rank holds.

    Args:
        full_optim_state_dict: the full state on the first rank; ignored on other ranks,
            which may pass None.
        model: the sharded model, or a module that contains the sharded model.
        optim_input: parameters or groups of an optimizer that does not exist yet; used
            only without ``optim``. Default: a single group of all parameters.
        optim: the optimizer; default: use ``optim_input``.
        group: the ranks that take part; default: the ranks of the model.

    Returns: a state dict for ``optim.load_state_dict``.

    Collective: one broadcast of the structure, one all-gather of error texts, and one
    broadcast per tensor, over ``group``; all its ranks must call.
    Raises: as ``optim_state_dict_to_load``, on all ranks alike.
    """
    what = "scatter_full_optim_state_dict"
    # ``state_to_load`` calls ``groups`` inside the block that raises on all ranks.
    groups = partial(_groups, model, optim, optim_input, what)
    units = units_known(model, optim)
    (result,) = state_to_load(
        units,
        model,
        groups,
        full_optim_state_dict,
        from_first=True,
        group=group,
        what=what,
    )
    return result


def sharded_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state as copies in sharded values.

    Args:
        model: the sharded model, or a module that contains the sharded model.
        optim: the optimizer.
        group: ignored; accepted because FSDP1 has this argument.

    Returns: the state keyed by names, on the optimizer's devices.

    Collective: as ``optim_state_dict`` for the sharded type; all ranks must call.
    Raises: as ``optim_state_dict``.
    """
    given = _own_state(model, optim, "sharded_optim_state_dict")
    return sharded_state(model, [optim], [given], to_cpu=False)


def _own_state(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    what: str,
    *,
    first_only: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's own state; an error is raised on all ranks.

    Raises: DesyncError, if another rank does not call ``what``.
    """
    # Before the exchange of errors: a rank that is alone would wait in that exchange.
    units = units_known(model, optim)
    meet_for_state(units, what, first_only=first_only)
    with raise_on_all_ranks(shard_groups(units)):
        require_pair(model, optim, what)
        return local_state_dict(optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return a state dict for ``optim.load_state_dict``, made from sharded values.

    Args:
        sharded_optim_state_dict: the state keyed by names, with sharded values.
        model: the sharded model, or a module that contains the sharded model.
        optim: the optimizer.

    Returns: a state dict for ``optim.load_state_dict``.

    Collective: none, if the sharded values belong to the same plan; else as
    ``optim_state_dict_to_load``.
    Raises: as ``optim_state_dict_to_load``.
    """
    what = "flatten_sharded_optim_state_dict"
    require_pair(model, optim, what)
    units = units_known(model, optim)
    (result,) = state_to_load(
        units, model, lambda: [optim.param_groups], sharded_optim_state_dict, what=what
    )
    return result


def _groups(*args: Any) -> list[list[Group]]:
    """Return the groups of a single optimizer as a list; see ``groups_of``."""
    return [groups_of(*args)]
