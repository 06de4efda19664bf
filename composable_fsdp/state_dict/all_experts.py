"""The entries of other ranks' experts in ``module.state_dict()``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import join_name
from composable_fsdp.planning.walk import named
from composable_fsdp.state_dict.dcp_caller import dcp_request
from composable_fsdp.state_dict.other_experts import from_all_ranks, require_own_names
from composable_fsdp.tree.state import OWNERS, _FSDPState


def add_other_experts(
    state: _FSDPState,
    module: nn.Module,
    prefix: str,
    keys: Iterable[str],
    state_dict: dict[str, Any],
    kind: StateDictType,
    *,
    first_only: bool,
) -> None:
    """Add the entries of the ranks with other experts, or refuse equal names.

    Collective: over the ranks of the ``expert_mesh`` an all-gather of objects, and for
        full values a broadcast per tensor; none for local shards.
    Raises: CheckpointError, on all ranks, for a name of several ranks;
        CompositionError, for full values on the first rank only.
    """
    group = state.handle.groups.experts
    assert group is not None
    # Local shards are a rank's own in any case.
    if kind is StateDictType.LOCAL_STATE_DICT:
        return
    own = {key: state_dict[key] for key in keys if key in state_dict}
    if kind is StateDictType.SHARDED_STATE_DICT:
        # Each rank has its own entries, which DCP joins by name.
        require_own_names(own, group)
        return
    if first_only:
        raise CompositionError(
            f"state_dict of {state.name} with rank0_only expects experts as DTensors, "
            "or no expert_mesh: the first rank would have its own experts alone. Leave "
            "rank0_only out (offload_to_cpu=True keeps the GPU free), or save with "
            "torch.distributed.checkpoint under SHARDED_STATE_DICT."
        )
    # torch asks the module for the parameter of each key.
    if dcp_request() is not None:
        raise CompositionError(
            "get_state_dict of torch.distributed.checkpoint with full_state_dict=True "
            f"looks each name up in the module, and {state.name} holds the experts of "
            "this rank alone. Call model.state_dict() and optim_state_dict(model, "
            "optim), which hold the experts of all ranks, or leave full_state_dict out."
        )
    # A model that was built on meta has no values to send yet.
    layout = state.handle.layout
    device = torch.device("meta") if layout.on_meta else layout.device
    # torch and the settings decide where values of this rank are; others follow.
    to_cpu = any(not value.is_meta and value.device != device for value in own.values())
    # Taken out, so that the experts of all ranks have one order on all ranks.
    for key in own:
        del state_dict[key]
    state_dict |= from_all_ranks(own, group, device, to_cpu=to_cpu)
    buffers = {
        key: state_dict[key]
        for path, each in named(module)
        if OWNERS.get(each) is state
        for name in each._buffers
        if (key := prefix + join_name(path, name)) in state_dict
    }
    # Buffers of experts have the names of the experts; others are on all ranks.
    state_dict |= from_all_ranks(
        buffers, group, layout.device, to_cpu=to_cpu, may_repeat=True
    )
