"""LOCAL_STATE_DICT: this rank's shards as plain tensors, and the plan they belong to.

Names are the plain model's names. Only the plan tells which elements of a parameter a
shard holds, so the plan is stored in the metadata of a module's state dict and compared
on load.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.naming import quoted
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.planning.walk import named
from composable_fsdp.state_dict.dcp_caller import is_checkpointing
from composable_fsdp.tree.traversal import walk_states

PLAN = "_composable_fsdp_plan"
"""Key in a module's metadata: the plans of all units in the module, by name.

The metadata holds all plans and not only the module's own, because torch finds metadata
by module path, and below a wrapper the path differs from the path at save time.
"""

Plan = dict[str, Any]
"""The facts that decide which elements the shards of a rank hold."""


def plan_of(handle: FlatParamHandle) -> Plan:
    """Return the plan of a unit on this rank; numbers and names only."""
    return {
        "rank": handle.groups.rank,
        "world_size": handle.groups.shard_world_size,
        "rows": handle.layout.rows,
        "regions": [
            [
                str(region.layout.dtype),
                region.layout.padded_numel,
                [_facts_of(slot) for slot in region.layout.parameters],
            ]
            for region in handle.layout.regions
        ],
    }


def _facts_of(slot: ParameterSlot) -> list[Any]:
    """Return the name of a parameter, and which elements this rank's unit holds."""
    # Of a rectangle of tensor parallelism also the place in the whole parameter.
    place = [] if slot.whole is None else [str(slot.whole)]
    return [slot.fqn, *slot.shape, *place]


def plans_of(module: nn.Module) -> dict[str, Plan]:
    """Return the plans of all units in ``module`` by name; its own name is empty.

    A unit that is registered under several names has an entry for each.
    """
    plans = {id(each): plan_of(state.handle) for _, each, state in walk_states(module)}
    return {
        fqn: plans[id(each)]
        for fqn, each in named(module, every_path=True)
        if id(each) in plans
    }


def require_plan(handle: FlatParamHandle, found: object) -> None:
    """Refuse local shards of another plan.

    Raises: CheckpointError, with the first difference.
    """
    own = plan_of(handle)
    if found == own:
        return
    # No metadata: a full state dict, or a copy into a plain dict.
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
    """Return ``value`` as text of at most 200 characters."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class LocalValue(Tensor):
    """This rank's part of a parameter or of optimizer state, with own shape and memory.

    Operators and pickle treat the value as a plain tensor. Copies and moves keep the
    class; results of other operators are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on plain tensors; keep the class for copies and moves.

        Raises: CheckpointError, if DCP is calling.
        """
        # DCP treats a plain tensor as equal on all ranks and would give every rank the
        # first rank's part. The stagers of async_save make plain tensors before the
        # planner sees the values, so refuse here.
        if is_checkpointing():
            _refuse("a value of this state dict")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # A copy still holds only this rank's part, so DCP must refuse the copy, too.
        if func in _COPIES and type(result) is Tensor:
            return result.as_subclass(cls)
        return result

    def plain(self) -> Tensor:
        """Return a plain tensor with the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        # The file holds plain tensors, so reading needs no class of this package.
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a clone, which is a ``LocalValue``, too."""
        made = memo[id(self)] = self.clone()
        return made

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        """Refuse a save by DCP. Raises: CheckpointError."""
        _refuse(repr(fqn))

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse a load by DCP. Raises: CheckpointError."""
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
"""Functions whose result is a part, too."""


def _refuse(name: str) -> NoReturn:
    """Raise CheckpointError: DCP cannot save or load local shards."""
    raise CheckpointError(
        f"torch.distributed.checkpoint was given LOCAL_STATE_DICT: it takes {name} for "
        "a tensor that every rank holds whole and would give all ranks the first "
        "one's. Take the state dict under StateDictType.SHARDED_STATE_DICT, which it "
        "saves and loads at any world size; or save local ones with torch.save, a file "
        "per rank."
    )


def as_local(handle: FlatParamHandle | None, part: Tensor, *, to_cpu: bool) -> Tensor:
    """Return ``part`` as a ``LocalValue``; as a plain tensor for a full value."""
    value = part.detach()
    if to_cpu:
        value = value.to("cpu", copy=True)
    # A full value is equal on all ranks, as DCP assumes; a rectangle is not.
    if handle is None or (handle.groups.shard is None and not handle.layout.forms):
        return value
    return value.as_subclass(LocalValue)


def local_values(handle: FlatParamHandle, *, to_cpu: bool) -> dict[int, Tensor]:
    """Return this rank's shards by slot index, or copies in host memory."""
    return {
        ref.slot.index: as_local(handle, ref.leaf, to_cpu=to_cpu)
        for ref in param_refs(handle)
    }
