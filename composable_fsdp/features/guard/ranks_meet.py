"""The ranks of a tree meet before a broadcast, and in the tree's first forwards."""

from __future__ import annotations

import torch
from torch import nn

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.meeting import Call
from composable_fsdp.features.guard.order_logs import assign_order_logs
from composable_fsdp.features.guard.same_models import compare_models, meet_if_used
from composable_fsdp.tree.initial_weights import ALL_RANKS
from composable_fsdp.tree.state import RuntimeContext, _RootFSDPState

_SYNC_EVERYWHERE = (
    "The values of the first rank are broadcast: shard the model on every rank, "
    "outside of any 'if rank == 0'."
)


def meet_to_sync(api: str, module: nn.Module, ranks: RankLayout) -> None:
    """Wait for all ranks before a broadcast, if they train another model already."""
    details = ("sync_module_states=True",)
    call = Call(api, type(module).__name__, details, _SYNC_EVERYWHERE)
    groups = [g for g in (ranks.shard, ranks.replicate) if g is not None]
    meet_if_used(groups, call)


def compare_ranks(context: RuntimeContext, root: _RootFSDPState) -> None:
    """Compare the ranks of a tree; begin the order logs.

    Collective, Raises: as ``compare_models``.
    """
    before = root.initial.compared
    # If a forward gathers nothing, a rank may run the forward alone, also with
    # gradients that are not reduced (``no_sync``). So replicas are compared in the
    # first forward that leads to a reduction.
    reduces = any(unit.settings.sync_gradients for unit in root._root_states)
    compare_models(root, replicas=reduces and torch.is_grad_enabled())
    after = root.initial.compared
    if not context.is_checked or after != before:
        # Not before the comparison: other models may have other logs, and the ranks
        # would number all later logs otherwise.
        assign_order_logs(context, replicas=after == ALL_RANKS)
