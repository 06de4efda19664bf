"""The units that take part in a call on optimizer state, and their shard groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.meeting import Call
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.tree.meeting import meet_over
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_states


def units_known(model: object, optim: object) -> list[_FSDPState]:
    """Return the units in ``model``; if ``model`` is no module, the units of ``optim``.

    The units of ``optim`` are returned only if they share a single shard group.
    """
    if isinstance(model, nn.Module):
        return _get_fsdp_states(model)
    # ``model`` is wrong on this rank, and may be right on the other ranks. Find the
    # units through the optimizer, so that the other ranks receive the error.
    optims = optim if isinstance(optim, (list, tuple)) else [optim]
    groups = [g for each in optims for g in getattr(each, "param_groups", ())]
    parameters = [p for group in groups for p in group["params"]]
    places = (find_leaf(p) or find_flat(p) for p in parameters)
    handles = dict.fromkeys(place[0] for place in places if place is not None)
    states = [_get_module_fsdp_state(handle.infos[0].module) for handle in handles]
    units = [state for state in states if state is not None]
    # With several groups, the order of collectives follows the model, which is not
    # known.
    return units if len(shard_groups(units)) == 1 else []


def meet_for_state(
    units: Sequence[_FSDPState],
    what: str,
    *details: str,
    first_only: bool = False,
    replicas: bool = False,
) -> None:
    """Wait until every rank of the units calls ``what``, a function of optimizer state.

    Collective: none, as ``meet``.
    Raises: DesyncError, as ``meet``.
    """
    # With and without ``rank0_only`` other collectives are sent.
    if first_only:
        details += ("rank0_only=True",)
    # Without the name of a unit: ``units_known`` may find the units in another order.
    meet_over(units, Call(what, details=details), replicas=replicas)


def shard_groups(units: Sequence[_FSDPState]) -> list[dist.ProcessGroup]:
    """Return the shard groups of the units, each once, in the order of the units."""
    groups = [unit.handle.groups.shard for unit in units]
    return list(dict.fromkeys(group for group in groups if group is not None))
