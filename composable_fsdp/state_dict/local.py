"""LOCAL_STATE_DICT: this rank's shards as they lie, and the plan they belong to.

The tensors are plain and their names are the plain model's; what part of a parameter
each one is follows from the plan alone. So the plan travels with them, in the metadata
of a module's state dict, and loading compares it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import shown
from composable_fsdp.tree.traversal import walk_states

PLAN = "_composable_fsdp_plan"
"""Key, in the metadata of a unit's module, of the plans of the units in it by name.

All of them, because metadata is found by the path of a module, and below a wrapper that
is not the path under which it was saved.
"""

Plan = dict[str, Any]


def plan_of(handle: FlatParamHandle) -> Plan:
    """What decides which elements this rank's shards are; only numbers and names."""
    return {
        "rank": handle.groups.rank,
        "world_size": handle.groups.shard_world_size,
        "rows": handle.rows,
        "regions": [
            [
                str(region.layout.dtype),
                region.layout.padded_numel,
                [[slot.fqn, *slot.shape] for slot in region.layout.parameters],
            ]
            for region in handle.regions
        ],
    }


def plans_of(module: nn.Module) -> dict[str, Plan]:
    """The plans of all units in ``module`` by name, its own under the empty one."""
    return {fqn: plan_of(state.handle) for fqn, _, state in walk_states(module)}


def require_plan(handle: FlatParamHandle, found: object) -> None:
    """Refuse local shards of another plan.

    Raises: CheckpointError, with what differs first.
    """
    own = plan_of(handle)
    if found == own:
        return
    if not isinstance(found, dict) or found.keys() != own.keys():
        difference = "it carries no plan"
    else:
        key = next(key for key in own if own[key] != found[key])
        difference = (
            f"its {key} was {_short(found[key])}, here it is {_short(own[key])}"
        )
    raise CheckpointError(
        f"Unit {shown(handle.full_fqn)} is set to LOCAL_STATE_DICT and expects what "
        f"the same rank saved under the same plan, but {difference}. Pass the object "
        "that state_dict() returned, metadata included; for another world size or "
        "another policy save and load with FULL_STATE_DICT."
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def local_values(handle: FlatParamHandle) -> dict[int, Tensor]:
    """This rank's shards by slot index; they share the model's memory."""
    return {
        slot.index: leaf.detach()
        for region in handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
    }
