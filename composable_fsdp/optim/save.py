"""Optimizer state of the plain model, gathered from the ranks' shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from composable_fsdp.access.gather import gather_flat_values
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    StateDictType,
)
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.optim.consensus import raise_on_all_ranks, units_known
from composable_fsdp.optim.keys import aligned_groups
from composable_fsdp.optim.local_state import local_state
from composable_fsdp.optim.names import Group, Named, Optimizers, require_pairs
from composable_fsdp.optim.own_state_dict import joined_state, local_state_dict
from composable_fsdp.optim.sharded import as_sharded
from composable_fsdp.optim.state_exchange import is_scalar, require_same_state
from composable_fsdp.optim.step_checks import require_elementwise
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.settings import get_state_dict_type
from composable_fsdp.tree.traversal import _get_fsdp_states


def optim_state_dict(
    model: nn.Module,
    optim: Optimizers,
    optim_state_dict: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state, keyed by the plain model's parameter names.

    ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}``,
    with tensors of the plain model's shapes on the CPU of every rank, unless
    ``set_state_dict_type`` asked for something else (``rank0_only``: ``{}`` on the
    other ranks; sharded: ``ShardedValue`` in the place of tensors; local: this rank's
    shards, and the plans they belong to).

    Args:
        model: the sharded model, or a module that holds it.
        optim: an element-wise optimizer over its parameters; or a list of several, each
            over its own, whose states and groups come out as those of one.
        optim_state_dict: what ``optim.state_dict()`` returned, if not as it is now; by
            numbers or by names. A list of those, for a list of optimizers.
        group: ignored; each unit knows its ranks. Here because FSDP1 has it.

    Collective: per unit and state one all-gather over the shard group (one gather per
    region with ``rank0_only``), and one exchange of state names per group before; all
    ranks must call. For sharded values that exchange alone; none for local shards.
    Raises: CompositionError, for an optimizer that needs whole parameters;
    CheckpointError, for state that is not element-wise or a foreign parameter;
    DesyncError, if ranks have different state; PhaseError, inside a step.
    """
    units = units_known(model, optim)
    settings = units[0].state_dict_settings if units else FULL_BY_DEFAULT
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    with raise_on_all_ranks([] if is_local else units):
        optims = require_pairs(model, optim, "optim_state_dict")
        for each in optims:
            require_elementwise(each)
        if units:
            get_state_dict_type(model)  # one for all of them
        given = _given(optims, optim_state_dict)
    config = settings.optim_state_dict_config
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return sharded_state(model, optims, given, to_cpu=config.offload_to_cpu)
    if is_local:
        return local_state(model, optims, given, to_cpu=config.offload_to_cpu)
    first_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    return full_state(
        model, optims, given, first_only=first_only, to_cpu=config.offload_to_cpu
    )


def _given(optims: list[torch.optim.Optimizer], given: Any) -> list[dict[str, Any]]:
    """The state of each, as it was passed or as it is now. Raises: TypeError."""
    if given is None:
        return [local_state_dict(each) for each in optims]
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(found) != len(optims):
        raise TypeError(
            f"optim_state_dict expects a state for each of {len(optims)} optimizers, "
            f"got {len(found)}. Pass a list of what their state_dict() returned."
        )
    return found


def full_state(
    model: nn.Module,
    optims: Sequence[torch.optim.Optimizer],
    given: Sequence[dict[str, Any]],
    *,
    first_only: bool,
    to_cpu: bool,
) -> dict[str, Any]:
    """Return full state whatever type is set; see ``optim_state_dict``."""
    units = _get_fsdp_states(model)
    members, options, states, by_handle = _agreed(model, optims, given)
    wanted = not (first_only and units and not units[0].handle.groups.is_first)
    result: dict[str, dict[str, Any]] = {}
    for named, values in zip(members, states, strict=True):
        if values and wanted:
            result[named.fqn] = {
                # What is cut is replaced as soon as its unit has been gathered.
                k: v if named.is_cut and not is_scalar(v) else _copy(v, to_cpu)
                for k, v in values.items()
            }
    for indices in by_handle.values():
        _gather(members, states, indices, result, first_only, to_cpu)
    return {"state": result, "param_groups": options} if wanted else {}


def sharded_state(
    model: nn.Module,
    optims: Sequence[torch.optim.Optimizer],
    given: Sequence[dict[str, Any]],
    *,
    to_cpu: bool,
) -> dict[str, Any]:
    """Return the state as sharded values, whatever type is set.

    Tensors are copies. None is sent.
    """
    members, options, states, _ = _agreed(model, optims, given)
    result = {
        named.fqn: {
            key: as_sharded(named, _copy(value, to_cpu))
            for key, value in values.items()
        }
        for named, values in zip(members, states, strict=True)
        if values
    }
    return {"state": result, "param_groups": options}


def _agreed(
    model: nn.Module,
    optims: Sequence[torch.optim.Optimizer],
    given: Sequence[dict[str, Any]],
) -> tuple[list[Named], list[Group], list[dict[str, Any]], dict[int, list[int]]]:
    """The parameters, their groups, their states, and which of them a unit cuts.

    Refuses on all ranks alike what one of them cannot put together.
    """
    units = _get_fsdp_states(model)
    with raise_on_all_ranks(units):
        for state in units:
            require_between_steps(state, "optim_state_dict")
        groups, joined, own = joined_state(model, optims, given, "optim_state_dict")
    members = [named for group_members in groups for named in group_members]
    states: list[dict[str, Any]] = [joined["state"].get(m.fqn, {}) for m in members]
    by_handle: dict[int, list[int]] = {}
    # By name and not as the optimizer has them: what is sent follows this order.
    for i in sorted(range(len(members)), key=lambda i: members[i].fqn):
        if members[i].is_cut:
            by_handle.setdefault(id(members[i].handle), []).append(i)
    require_same_state(members, states, by_handle, units)
    options = aligned_groups(groups, joined, own)
    return members, options, states, by_handle


def _copy(value: Any, to_cpu: bool) -> Any:
    """A copy of a tensor, or of the tensors in lists and dicts, as LBFGS has them."""
    if isinstance(value, (list, dict)):
        return _pytree.tree_map(partial(_copy, to_cpu=to_cpu), value)
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu" if to_cpu else value.device, copy=True)


def _gather(
    members: list[Named],
    states: list[dict[str, Any]],
    indices: list[int],
    result: dict[str, dict[str, Any]],
    first_only: bool,
    to_cpu: bool,
) -> None:
    """Gather the tensors of one unit, one state name after the other."""
    handle = members[indices[0]].handle
    assert handle is not None
    names = sorted(
        {k for i in indices for k, v in states[i].items() if not is_scalar(v)}
    )
    if first_only and not handle.groups.in_first_replica:
        return
    for name in names:
        shards = [
            _empty_shard(handle, r, members, states, indices, name)
            for r in range(len(handle.regions))
        ]
        for i in indices:
            value = states[i].get(name)
            region, slot = members[i].region, members[i].slot
            if value is None or region is None or slot is None or is_scalar(value):
                continue
            at = region.layout.shard_offset(slot, region.rank)
            shard = shards[handle.regions.index(region)]
            shard[at : at + value.numel()].copy_(value.reshape(-1))
        fulls = gather_flat_values(handle, shards, first_only=first_only)
        if not fulls or not result:
            continue
        for i in indices:
            region, slot = members[i].region, members[i].slot
            if name not in states[i] or region is None or slot is None:
                continue
            full = fulls[handle.regions.index(region)]
            part = full[slot.offset : slot.offset + slot.numel].view(slot.shape)
            result[members[i].fqn][name] = _copy(part, to_cpu)


def _empty_shard(
    handle: FlatParamHandle,
    index: int,
    members: list[Named],
    states: list[dict[str, Any]],
    indices: list[int],
    name: str,
) -> Tensor:
    """A zeroed ``(shard_numel,)`` in the state's dtype; empty if nobody has it."""
    region = handle.regions[index]
    for i in indices:
        value = states[i].get(name)
        if members[i].region is region and isinstance(value, Tensor) and value.ndim:
            buffer = memory.new_buffer(
                region.layout.shard_numel, value.dtype, handle.device
            )
            return buffer.zero_()
    return memory.new_buffer(0, region.layout.dtype, handle.device)
