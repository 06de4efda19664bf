"""FSDP1's older names for an optimizer's state: one function per type and step.

Each says by its name what ``set_state_dict_type`` says for ``optim_state_dict`` and
``optim_state_dict_to_load``, and looks at no setting.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.optim.consensus import raise_on_all_ranks, units_known
from composable_fsdp.optim.load import state_to_load
from composable_fsdp.optim.names import Group, groups_of, require_pair
from composable_fsdp.optim.own_state_dict import local_state_dict
from composable_fsdp.optim.save import full_state, sharded_state


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Iterable[Any] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return full state on the CPU; ``{}`` on other ranks with ``rank0_only``.

    ``optim_input`` and ``group`` are not needed. Collective, Raises: as
    ``optim_state_dict``.
    """
    given = _own_state(model, optim, "full_optim_state_dict")
    return full_state(model, [optim], [given], first_only=rank0_only, to_cpu=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a state that every rank holds in full.

    ``optim_input``: the parameters or groups of the optimizer, if it is not there yet.
    Sends nothing. Raises: as ``optim_state_dict_to_load``.
    """
    what = "shard_full_optim_state_dict"
    groups = partial(_groups, model, optim, optim_input, what)
    units = units_known(model, optim)
    (result,) = state_to_load(units, model, groups, full_optim_state_dict)
    return result


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a state that only the first rank holds.

    The other ranks pass ``None``, or anything.

    Collective: one broadcast of the structure, one exchange of what ranks refuse, and
    one broadcast per tensor, over ``group`` or the model's ranks.
    Raises: as ``optim_state_dict_to_load``, on all ranks alike.
    """
    what = "scatter_full_optim_state_dict"
    groups = partial(_groups, model, optim, optim_input, what)
    units = units_known(model, optim)
    (result,) = state_to_load(
        units, model, groups, full_optim_state_dict, from_first=True, group=group
    )
    return result


def sharded_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return state as sharded values in the optimizer's own memory.

    ``group`` is not needed. Collective, Raises: as ``optim_state_dict``.
    """
    given = _own_state(model, optim, "sharded_optim_state_dict")
    return sharded_state(model, [optim], [given], to_cpu=False)


def _own_state(
    model: nn.Module, optim: torch.optim.Optimizer, what: str
) -> dict[str, Any]:
    """The optimizer's state as it has it; what is wrong is told to the other ranks."""
    with raise_on_all_ranks(units_known(model, optim)):
        require_pair(model, optim, what)
        return local_state_dict(optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict`` takes, of sharded values of this plan.

    Sends nothing. Raises: as ``optim_state_dict_to_load``.
    """
    require_pair(model, optim, "flatten_sharded_optim_state_dict")
    units = units_known(model, optim)
    (result,) = state_to_load(
        units, model, lambda: [optim.param_groups], sharded_optim_state_dict
    )
    return result


def _groups(*args: Any) -> list[list[Group]]:
    """The groups of the one optimizer; see ``groups_of``."""
    return [groups_of(*args)]
