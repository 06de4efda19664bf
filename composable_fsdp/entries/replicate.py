"""``replicate``: whole parameters on every rank, gradients averaged; in place.

It runs the code of ``fully_shard`` with nothing cut, under a name of its own in the
registry, by which walks from above leave the subtree alone::

    fully_shard(model)                      replicate(model)
      |- replicate(part)   left alone         |- fully_shard(block)   left to its unit
      '- everything else   sharded            '- everything else      averaged whole
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import Groups
from composable_fsdp.compose.contract import contract
from composable_fsdp.config import ShardingStrategy
from composable_fsdp.entries.apply import apply, prepare
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat import part_guards
from composable_fsdp.flat.build import set_divisions
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.planning.assign import REPLICATE
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states


@contract(_FSDPState)
def replicate(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    policy: object = None,
    device_id: int | torch.device | None = None,
    init_sync: bool = True,
    limit_all_gathers: bool = True,
    tied_params: str = "error",
) -> None:
    """Average the gradients of ``module`` over ranks; every rank keeps it whole.

    Class, names, shapes and parameter objects stay. Units that ``fully_shard`` made
    below stay sharded and share the iteration; if their ranks are others than those of
    ``process_group``, their gradients are averaged over these, too, so that
    ``fully_shard`` within a node under ``replicate`` across nodes is HYBRID_SHARD.
    ``fully_shard`` above leaves the whole subtree alone.

    Args:
        module: what to replicate.
        ignored_modules: modules below to leave alone.
        process_group, device_mesh: the ranks, a group or a 1-D mesh; else all.
        policy: which modules below reduce by themselves, as for ``fully_shard``: their
            all-reduce overlaps with the backward of the others.
        device_id: compute device, as for ``fully_shard``.
        init_sync: give every rank the parameters and buffers of the group's first rank.
            Buffers are not synchronised again in later forwards.
        limit_all_gathers: must equal that of the units below.
        tied_params: as for ``fully_shard``.

    Collective: with ``init_sync`` one broadcast per parameter, buffer, and region of
    units below that join; else none. Backward: one all-reduce per region.
    Raises: CompositionError, PlanError, TypeError; the module is as it was.

    >>> replicate(model)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"replicate expects one module, got a {type(module).__name__}. Apply it to "
            "one after the other."
        )
    state = replicate.state(module)
    assert state is not None
    application = prepare(
        UnitOptions(
            strategy=ShardingStrategy.NO_SHARD, limit_all_gathers=limit_all_gathers
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
    group = application.ranks.shard
    joining = [
        each
        for _, _, each in walk_states(module)
        if each is not state and _joins(each.handle, group)
    ]
    apply([module], state, application)
    for each in joining:
        handle = each.handle
        handle.groups = Groups(handle.groups.shard, group)
        # One rank that had it all has its gradients averaged from now on.
        handle.guards = part_guards.find_guards(handle, each.modules)
        part_guards.refuse_part_calls(handle)
        set_divisions(handle)
        for region in handle.regions:
            if init_sync and region.shard.numel():
                collectives.broadcast(region.shard, group)


def _joins(handle: FlatParamHandle, group: dist.ProcessGroup) -> bool:
    """Whether a unit's gradients have to be averaged over ``group`` as well.

    Raises: CompositionError, if its ranks and those of ``group`` form no grid.
    """
    groups = handle.groups
    covered = {dist.get_rank()}
    for each in (groups.shard, groups.replicate):
        covered |= (
            set(dist.get_process_group_ranks(each)) if each is not None else set()
        )
    ranks = set(dist.get_process_group_ranks(group))
    if ranks <= covered:
        return False
    if groups.replicate is not None or len(covered & ranks) > 1:
        raise CompositionError(
            f"replicate over ranks {sorted(ranks)} meets fully sharded module "
            f"{quoted(handle.fqn)} over ranks {sorted(covered)}: the two share some "
            "ranks and not all, so no average over both is right. Shard within groups "
            "that meet each replicate group in one rank, or over all its ranks."
        )
    return True
