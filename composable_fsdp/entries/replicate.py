"""``replicate``: full parameters on every rank, averaged gradients; in place.

The code of ``fully_shard`` with strategy NO_SHARD, and a state of another name, whose
subtree a walk from a unit above does not enter; units of ``fully_shard`` below it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import Groups
from composable_fsdp.compose.contract import contract
from composable_fsdp.compose.registry import REPLICATE
from composable_fsdp.config import NO_SHARD, Report, TiedParams
from composable_fsdp.entries.apply import apply, prepare
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat import part_guards
from composable_fsdp.flat.build import set_divisions
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tree.root import compare_models
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states

if TYPE_CHECKING:
    from composable_fsdp.planning.policies import AnyPolicy

M = TypeVar("M", bound=nn.Module)


@contract(cast("Callable[[], Any]", _FSDPState))
def replicate(
    module: M,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    policy: AnyPolicy | None = None,
    device_id: int | torch.device | None = None,
    init_sync: bool = True,
    limit_all_gathers: bool = True,
    tied_params: TiedParams = "error",
    check_weights: Report = "warn",
) -> M:
    """Average the gradients of ``module`` over ranks; every rank holds all parameters.

    Class, names, shapes and parameter objects stay unchanged. Units that
    ``fully_shard`` made below stay sharded and run in the same iteration. If their
    ranks differ from the ranks of ``process_group``, their gradients are averaged over
    ``process_group``, too: ``fully_shard`` within a node under ``replicate`` across
    nodes is HYBRID_SHARD. A later ``fully_shard`` above leaves the whole subtree alone.

    Args:
        module: The module to replicate.
        ignored_modules: Modules below that are left alone. Default None.
        process_group, device_mesh: The ranks, as a group or as a 1-D mesh. Default: the
            default group.
        policy: Selects modules below whose gradients are reduced separately, as in
            ``fully_shard``: their all-reduce overlaps with the backward of other
            modules. Default None.
        device_id: The compute device, as in ``fully_shard``.
        init_sync: Broadcast the parameters and buffers of the group's first rank. Later
            forwards do not synchronize buffers. Default True.
        limit_all_gathers: Must equal the setting of the units below. Default True.
        tied_params: As in ``fully_shard``. Default "error".
        check_weights: As in ``fully_shard``; matters with ``init_sync=False``. Default
            "warn".

    Returns: ``module``, the same object.
    Collective: with ``init_sync`` a broadcast per parameter, per buffer, and per region
        of a joining unit below, before which the joining units are compared with the
        ranks that share them, as in a first forward; else none. In backward an
        all-reduce per region.
    Raises: CompositionError, PlanError, TypeError, and DesyncError of that comparison;
        the module is then unchanged.

    >>> replicate(model)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"replicate expects one module, got a {type(module).__name__}. Apply it to "
            "one after the other."
        )
    state = replicate.state(module)
    assert state is not None
    # NO_SHARD: the shard is the full parameter, and gradients are all-reduced.
    application = prepare(
        UnitOptions(
            strategy=NO_SHARD,
            limit_all_gathers=limit_all_gathers,
            check_weights=check_weights,
        ),
        process_group=process_group,
        device_mesh=device_mesh,
        policy=policy,
        ignored_modules=ignored_modules,
        device_id=device_id,
        sync_module_states=init_sync,
        tied_params=tied_params,
        api=REPLICATE,
    )
    # Found before ``apply``, so that a grid that does not fit is refused without a
    # change.
    group = application.ranks.shard
    joining = [
        each
        for _, _, each in walk_states(module)
        if each is not state and _joins(each.handle, group)
    ]
    if init_sync:
        # The broadcast below makes replicas equal, so ranks that share a unit are
        # compared now.
        for each in joining:
            compare_models(each, replicas=False)
    apply([module], state, application)
    for each in joining:
        _join(each, group, sync=init_sync)
    return module


def _join(state: _FSDPState, group: dist.ProcessGroup, *, sync: bool) -> None:
    """Make ``group`` the replicate group of a sharded unit; ``sync``: broadcast shards.

    Collective: with ``sync`` a broadcast over ``group`` per region with elements.
    """
    # A reduction is then a reduce-scatter over the shard group and an all-reduce over
    # ``group``.
    handle = state.handle
    handle.groups = Groups(handle.groups.shard, group)
    # A unit held by a single rank had no guards; calls of the unit's parts would now
    # bypass the average.
    handle.guards = part_guards.find_guards(
        handle.groups, handle.layout.owners, state.modules, handle.layout.forms
    )
    part_guards.refuse_part_calls(handle)
    # The divisor of the average depends on the number of ranks.
    set_divisions(handle)
    if not sync:
        return
    for region in handle.layout.regions:
        # An empty shard has no elements on any rank of the replicate group.
        if region.shard.numel():
            collectives.broadcast(region.shard, group)
    state.initial.forget()


def _joins(handle: FlatParamHandle, group: dist.ProcessGroup) -> bool:
    """Return whether a unit's gradients must be averaged over ``group``, too.

    Raises: CompositionError, if the unit's ranks and the ranks of ``group`` form no
        grid.
    """
    groups = handle.groups
    covered, ranks = groups.ranks, set(dist.get_process_group_ranks(group))
    if ranks <= covered:
        return False
    # An average over both groups is right only if each replicate group meets each shard
    # group in exactly one rank.
    # Sums over further ranks follow the shards of the plain placements alone.
    is_plain = groups.scatter_ref is groups.shard_ref and groups.kept_ref is None
    if not is_plain or groups.replicate is not None or len(covered & ranks) > 1:
        raise CompositionError(
            f"replicate over ranks {sorted(ranks)} meets fully sharded module "
            f"{quoted(handle.layout.plan.fqn)} over ranks {sorted(covered)}: the two "
            "share some ranks and not all, so no average over both is right. Shard "
            "within groups that meet each replicate group in one rank, or over all its "
            "ranks."
        )
    return True
