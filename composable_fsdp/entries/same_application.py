"""``if_sharded="skip"``: compare a sharded module with the arguments of a new call."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.compute_device import resolve_device
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.nodes import node_parts
from composable_fsdp.compose.registry import get_state
from composable_fsdp.config import HYBRID, ShardingStrategy
from composable_fsdp.entries.apply import Application
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import quoted
from composable_fsdp.planning.options import in_force
from composable_fsdp.planning.places import API
from composable_fsdp.tree.state import _FSDPState


def is_same_application(modules: Sequence[nn.Module], application: Application) -> bool:
    """Return whether ``modules`` are a unit with the options of ``application``.

    Raises: CompositionError, naming the first difference.
    """
    state = get_state(modules[0], API) if modules else None
    if not isinstance(state, _FSDPState):
        return False
    found = _difference(modules, state, application)
    if found:
        raise CompositionError(
            f"fully_shard(if_sharded='skip') found {type(modules[0]).__name__} "
            f"{quoted(state.fqn)} sharded with other settings: {found}. Use the same "
            "settings, or a fresh module."
        )
    return True


def _difference(
    modules: Sequence[nn.Module], state: _FSDPState, application: Application
) -> str:
    """Describe the first difference from ``application``; empty if there is none."""
    if list(map(id, modules)) != list(map(id, state.modules)):
        return (
            f"it is one unit of {len(state.modules)} modules, this call asks for a "
            f"unit of {len(modules)}"
        )
    # By effect and not by spelling: a unit that a policy made was given no options.
    has, asked = in_force(state.options), in_force(application.request.options)
    for name, value in asked.items():
        if has[name] != value:
            return f"it has {name}={has[name]}, this call asks for {value}"
    here = _members(state.ranks, state.options.strategy)
    there = _members(application.ranks, state.options.strategy)
    if here != there:
        return f"it is over {here}, this call asks for {there}"
    # Without device_id any device is accepted: the parameters are on the device of the
    # earlier call already.
    if application.device_id is not None:
        device = resolve_device(application.device_id, application.ranks, ())
        if device != state.device:
            return f"it computes on {state.device}, this call asks for {device}"
    return ""


def _members(ranks: RankLayout, strategy: ShardingStrategy) -> str:
    """Describe the ranks of the shard group and of the replicate group, in words."""
    if ranks.replicate is None and strategy in HYBRID:
        # Not the groups themselves: ``for_strategy`` would create them.
        shard, copies = (
            list(next(part for part in parts if dist.get_rank() in part))
            for parts in node_parts(ranks.world_size)
        )
    else:
        groups = ranks.for_strategy(strategy)
        shard, copies = (
            [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
            for group in (groups.shard, groups.replicate)
        )
    others = ranks.experts
    experts = [] if others is None else dist.get_process_group_ranks(others)
    apart = f" and other experts on {sorted(experts)}" if experts else ""
    return f"ranks {sorted(shard)}, with copies on {sorted(copies)}{apart}"
