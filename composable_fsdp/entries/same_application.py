"""``if_sharded="skip"``: compare a sharded module with the arguments of a new call.

The comparison is by effect, not by spelling. The new call is planned as if the units of
the earlier call did not exist; both plans must then give the same units the same
parameters, options and ranks. During planning the tree is shown as before the earlier
call::

    block.weight (k, 4) ->  a meta tensor (8, 4)      so that policies count elements
    registry of block   ->  without fully_shard       units of other calls stay
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.compute_device import resolve_device
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.nodes import node_parts
from composable_fsdp.compose.registry import get_state, has_api, remove_state, set_state
from composable_fsdp.config import HYBRID, ShardingStrategy
from composable_fsdp.entries.apply import Application
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.naming import WRAPPED_MODULE, quoted
from composable_fsdp.planning.assign import API
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.options import in_force
from composable_fsdp.planning.planner import Target, plan_modules
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states


def is_same_application(modules: Sequence[nn.Module], application: Application) -> bool:
    """Return whether ``modules`` are a unit that equals the result of ``application``.

    The modules are unchanged afterwards. Collective: none.
    Raises: CompositionError, naming the first difference; as ``apply``, for arguments
        with which no module could be sharded.
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
    # The units of the earlier call; units of other calls are boundaries in both plans.
    made = [
        each
        for module in modules
        for _, _, each in walk_states(module)
        if each.application == state.application
    ]
    # Planning reads shapes and the registry, so show the module as before the earlier
    # call.
    with _as_before(made) as stand_ins:
        request = application.request
        # The caller ignores real parameters by identity; the plan sees the stand-ins.
        ignored = frozenset(
            id(stand_ins[i]) if i in stand_ins else i
            for i in request.ignored_parameters
        )
        _, targets = plan_modules(modules, request._replace(ignored_parameters=ignored))
    own = {id(each.module): each for each in made}
    wanted = _by_unit(targets, own)
    for key, target in wanted.items():
        if key not in own:
            return f"this call makes a unit of {quoted(target.plan.fqn)}, which is none"
    for key, each in own.items():
        if key not in wanted:
            return f"{each.name} is a unit, and this call makes none of it"
    for key, target in wanted.items():
        found = _unit_difference(own[key], target, application)
        if found:
            return f"unit {quoted(target.plan.fqn)} {found}"
    return ""


def _by_unit(
    targets: Sequence[Target], own: Mapping[int, _FSDPState]
) -> dict[int, Target]:
    """Return the targets keyed by the identity of the module that holds the unit.

    A policy may select a wrapper, the wrapped module, or both. The key is the wrapped
    module, unless the wrapper itself is a unit.
    """
    found: dict[int, Target] = {}
    for target in targets:
        module = target.modules[0]
        inner = module._modules.get(WRAPPED_MODULE)
        key = id(module) if inner is None or id(module) in own else id(inner)
        # If a policy selects wrapper and wrapped module, the target of either has no
        # parameters.
        is_empty = not any(target.parameters)
        if key in found and is_empty:
            continue
        if inner is not None and is_empty and key not in own and has_api(inner, API):
            continue  # another call made this unit, and planning leaves it alone
        found[key] = target
    return found


@contextmanager
def _as_before(made: Sequence[_FSDPState]) -> Iterator[dict[int, nn.Parameter]]:
    """Show the tree as before ``made``; yield stand-ins by identity of the leaf."""
    undo: list[Any] = []
    stand_ins: dict[int, nn.Parameter] = {}
    try:
        for state in made:
            for module in state.modules:
                remove_state(module, API)
                undo.append((set_state, module, API, state))
            _show_whole(state, stand_ins, undo)
        yield stand_ins
    finally:
        # Restore the tree also after an exception of a policy.
        for act, *args in reversed(undo):
            act(*args)


def _show_whole(
    state: _FSDPState, stand_ins: dict[int, nn.Parameter], undo: list[Any]
) -> None:
    """Put a meta tensor of the full shape into every place of the unit's parameters."""
    handle = state.handle
    whole = {
        slot.index: nn.Parameter(
            torch.empty(slot.shape, dtype=layout.dtype, device="meta"),
            requires_grad=layout.trainable,
        )
        # ``origin`` is the layout as planned; rebuilt regions may be grouped
        # differently.
        for layout in handle.layout.origin
        for slot in layout.parameters
    }
    for ref in param_refs(handle):
        stand_ins[id(ref.leaf)] = whole[ref.slot.index]
    for place, table, key in zip(
        handle.layout.places, handle.layout.tables, handle.layout.keys, strict=True
    ):
        undo.append((table.__setitem__, key, table[key]))
        table[key] = whole[place.slot_index]


def _unit_difference(
    state: _FSDPState, target: Target, application: Application
) -> str:
    """Describe the first difference between a unit and its target; empty if none."""
    has, asked = in_force(state.options), in_force(target.plan.options)
    for name, value in asked.items():
        if has[name] != value:
            return f"has {name}={has[name]}, this call asks for {value}"
    here = _members(state.ranks, state.options.strategy)
    there = _members(application.ranks, state.options.strategy)
    if here != there:
        return f"is over {here}, this call asks for {there}"
    # Without device_id any device is accepted: the parameters are on the device of the
    # earlier call already.
    if application.device_id is not None:
        device = resolve_device(application.device_id, application.ranks, ())
        if device != state.device:
            return f"computes on {state.device}, this call asks for {device}"
    return _parameter_difference(state.handle.layout.origin, target.plan.regions)


def _parameter_difference(
    has: Sequence[RegionLayout], asked: Sequence[RegionLayout]
) -> str:
    """Describe the first difference between two lists of regions; empty if none."""
    ours, theirs = (
        {slot.fqns: layout for layout in layouts for slot in layout.parameters}
        for layouts in (has, asked)
    )
    for fqns in ours.keys() - theirs.keys():
        return f"holds {fqns[0]!r}, which this call leaves out (ignored, or elsewhere)"
    for fqns in theirs.keys() - ours.keys():
        return f"does not hold {fqns[0]!r} (ignored, or elsewhere), and this call does"
    # Equal parameters in different regions: group_by returned other groups.
    if tuple(has) != tuple(asked):
        return (
            f"lies in {len(has)} regions, this call lays it out otherwise, in "
            f"{len(asked)} (group_by)"
        )
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
