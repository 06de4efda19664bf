"""``replicate``: full parameters on every rank, averaged gradients; in place.

It is ``fully_shard`` with NO_SHARD and a state that a walk from above does not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm.meshes import resolve_ranks
from composable_fsdp.compose.contract import contract
from composable_fsdp.compose.registry import REPLICATE
from composable_fsdp.config import NO_SHARD, Report, TiedParams
from composable_fsdp.entries.apply import apply
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.planning.options import UnitOptions
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
    ``fully_shard`` made below stay sharded and run in the same iteration; they must
    average over all ranks of ``process_group``. A later ``fully_shard`` above leaves
    the whole subtree alone.

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
    Collective: with ``init_sync`` a broadcast per parameter and buffer; else none. In
        backward an all-reduce per region.
    Raises: CompositionError, PlanError, TypeError; the module is then unchanged.

    >>> replicate(model)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"replicate expects one module, got a {type(module).__name__}. Apply it to "
            "one after the other."
        )
    state = replicate.state(module)
    assert state is not None
    group = resolve_ranks(process_group, device_mesh, REPLICATE).shard
    for _, _, each in walk_states(module):
        if each is not state:
            _require_ranks(each.handle, group)
    apply(
        [module],
        state,
        # NO_SHARD: the shard is the full parameter, and gradients are all-reduced.
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
    return module


def _require_ranks(handle: FlatParamHandle, group: dist.ProcessGroup) -> None:
    """Raise CompositionError for a unit that does not average over all of ``group``."""
    covered, ranks = handle.groups.ranks, set(dist.get_process_group_ranks(group))
    if not ranks <= covered:
        raise CompositionError(
            f"replicate over ranks {sorted(ranks)} meets fully sharded module "
            f"{quoted(handle.layout.plan.fqn)} over ranks {sorted(covered)}: its "
            "gradients would not be averaged over the others. Shard it over all of "
            "these ranks; to shard within groups and replicate across, pass a 2-D "
            "device_mesh (replicate, shard) to fully_shard."
        )
