"""State of experts that are plain parameters, different on each rank of a mesh.

Experts are told apart by their names::

    rank 0    experts.0.weight, experts.1.weight --+--> experts.0 .. experts.3
    rank 1    experts.2.weight, experts.3.weight --+    on both ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from composable_fsdp.comm import collectives
from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError, CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.planning.walk import named
from composable_fsdp.state_dict.dcp_caller import dcp_request
from composable_fsdp.state_dict.sent import Described, described, send
from composable_fsdp.tree.state import OWNERS, _FSDPState


def expert_units(
    handles: Iterable[FlatParamHandle],
) -> dict[dist.ProcessGroup, list[FlatParamHandle]]:
    """Return the units of plain experts by the ranks with other experts."""
    found: dict[dist.ProcessGroup, list[FlatParamHandle]] = {}
    for handle in handles:
        group = handle.groups.experts
        if group is not None:
            found.setdefault(group, []).append(handle)
    return found


def refuse_experts(handles: Iterable[FlatParamHandle], what: str) -> None:
    """Raise CompositionError, on all ranks alike, for experts of this rank alone."""
    for unit in (units[0] for units in expert_units(handles).values()):
        raise CompositionError(
            f"{what} expects a model of which this rank has all names, and "
            f"{unit.name} holds the experts of this rank alone (expert_mesh). Call "
            "model.state_dict() and optim_state_dict(model, optim) on all ranks, "
            "without rank0_only, or save with torch.distributed.checkpoint under "
            "SHARDED_STATE_DICT."
        )


def require_different(told: Iterable[Iterable[str]]) -> None:
    """Raise CheckpointError if two ranks use a name for different experts."""
    seen: set[str] = set()
    twice: list[str] = []
    for each in map(set, told):
        twice += sorted(each & seen)
        seen |= each
    if twice:
        names = listed(map(quoted, dict.fromkeys(twice)))
        raise CheckpointError(
            f"State dicts expect another name for each expert; several ranks of the "
            f"expert_mesh hold {names}, and one of them would be lost. Keep the "
            "numbers of the plain model: nn.ModuleList with None in the places of "
            "other ranks' experts. Or stack the experts and pass DTensors of "
            "distribute_tensor(weight, mesh['ep'], [Shard(0)]) without expert_mesh."
        )


def from_all_ranks(
    own: Mapping[str, Any],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    to_cpu: bool,
    may_repeat: bool = False,
) -> dict[str, Any]:
    """Return the values of all ranks by name, those of the first rank first.

    Collective: an all-gather of objects and a broadcast per tensor over ``group``.
    Raises: CheckpointError, on all ranks of ``group``, for a name of two ranks.
    """
    told = collectives.all_gather_object(tree_map(described, dict(own)), group)
    # Before the first tensor, so that a refusal sends nothing.
    if not may_repeat:
        require_different(told)
    found: dict[str, Any] = {}
    # All ranks go through the descriptions, and so the broadcasts, in the same order.
    for rank, each in enumerate(told):
        # Only the sender has elements; the others make room.
        values = own if rank == group.rank() else each
        move = partial(_moved, group=group, rank=rank, device=device, to_cpu=to_cpu)
        for name in each:
            found.setdefault(name, tree_map(move, values[name]))
    return {**found, **own}


def _moved(
    value: Any,
    *,
    group: dist.ProcessGroup,
    rank: int,
    device: torch.device,
    to_cpu: bool,
) -> Any:
    """Return a value of ``rank``, by a broadcast if it has elements."""
    is_here = isinstance(value, Tensor) and value.dim() > 0
    if not is_here and not isinstance(value, Described):
        return value
    # As in plain torch, a model on meta has a state dict of names and shapes.
    if device.type == "meta":
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    whole = send(value, [group], device, rank=rank)
    return whole.cpu() if to_cpu and not is_here else whole


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
    """
    group = state.handle.groups.experts
    assert group is not None
    # Local shards are a rank's own in any case.
    if kind is StateDictType.LOCAL_STATE_DICT:
        return
    own = {key: state_dict[key] for key in keys if key in state_dict}
    if kind is StateDictType.SHARDED_STATE_DICT:
        # Each rank has its own entries, which DCP joins by name.
        require_different(collectives.all_gather_object(list(own), group))
        return
    if first_only:
        refuse_experts([state.handle], f"state_dict of {state.name} with rank0_only")
    if dcp_request() is not None:
        refuse_experts([state.handle], "get_state_dict with full_state_dict=True")
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
