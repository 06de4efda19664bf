"""LOCAL_STATE_DICT: this rank's shards as they lie, and the plan they belong to.

The tensors are plain and their names are the plain model's; what part of a parameter
each one is follows from the plan alone. So the plan travels with them, in the metadata
of a module's state dict, and loading compares it.

torch.distributed.checkpoint takes a plain tensor for one that every rank holds whole
and gives all ranks the first one's. So a part is a ``LocalValue`` until it is pickled:
a plain tensor to everybody but that package, which is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.state_dict.dcp_caller import is_checkpointing
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
        f"Unit {quoted(handle.full_fqn)} is set to LOCAL_STATE_DICT and expects what "
        f"the same rank saved under the same plan, but {difference}. Pass the object "
        "that state_dict() returned, metadata included; for another world size or "
        "another policy save and load with FULL_STATE_DICT."
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class LocalValue(Tensor):
    """This rank's part of a parameter or of its state, of its own shape and memory.

    Computes and is pickled as the plain tensor it is. Copies and moved ones are parts
    as well; what is computed from it is a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_checkpointing():
            # Stagers of async_save make plain tensors, which the planner cannot tell.
            _refuse("a value of this state dict")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _COPIES and type(result) is Tensor:
            return result.as_subclass(cls)
        return result

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = self.clone()
        return made

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        _refuse(repr(fqn))

    def __create_chunk_list__(self) -> NoReturn:
        _refuse("a value of this state dict")


_COPIES = frozenset(
    {
        Tensor.clone,
        Tensor.contiguous,
        Tensor.cpu,
        Tensor.cuda,
        Tensor.detach,
        Tensor.double,
        Tensor.float,
        Tensor.bfloat16,
        Tensor.half,
        Tensor.pin_memory,
        Tensor.to,
        Tensor.type,
        torch.clone,
        torch.detach,
    }
)


def _refuse(name: str) -> NoReturn:
    raise CheckpointError(
        f"torch.distributed.checkpoint was given LOCAL_STATE_DICT: it takes {name} for "
        "a tensor that every rank holds whole and would give all ranks the first "
        "one's. Take the state dict under StateDictType.SHARDED_STATE_DICT, which it "
        "saves and loads at any world size; or save local ones with torch.save, a file "
        "per rank."
    )


def as_local(handle: FlatParamHandle | None, part: Tensor, *, to_cpu: bool) -> Tensor:
    """``part`` as a local value, if ranks hold parts of the whole; copied to the host.

    Shares the memory of ``part`` unless it is copied.
    """
    value = part.detach()
    if to_cpu:
        value = value.to("cpu", copy=True)
    if handle is None or handle.groups.shard is None:
        return value
    return value.as_subclass(LocalValue)


def local_values(handle: FlatParamHandle, *, to_cpu: bool) -> dict[int, Tensor]:
    """This rank's shards by slot index; the model's memory, or copies on the host."""
    return {
        slot.index: as_local(handle, leaf, to_cpu=to_cpu)
        for region in handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
    }
