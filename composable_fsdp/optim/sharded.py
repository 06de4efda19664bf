"""Convert a state value of a parameter to a sharded value, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import Named
from composable_fsdp.optim.scalars import is_scalar
from composable_fsdp.state_dict.parts import mismatch, sharded_value
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _get_module_fsdp_state


def as_sharded(named: Named, value: Any) -> Any:
    """Return this rank's ``value`` as a ``ShardedValue``; scalars stay as they are."""
    ref = named.ref
    if ref is None:
        return value
    if not isinstance(value, Tensor) or value.shape != named.parameter.shape:
        # A scalar, or state that is not element-wise of a parameter that this rank
        # holds whole.
        return value
    return sharded_value(ref, value)


def mark_partial(handle: FlatParamHandle, values: dict[str, Any], name: str) -> None:
    """Forbid pickling of sharded values if the unit's state dict type is full."""
    unit = _get_module_fsdp_state(handle.layout.owners[0])
    if unit is None or unit.settings.state_dict.state_dict_type is not _FULL:
        return
    # ``optimizer.state_dict()`` shows sharded values for every state dict type, and
    # frameworks write the state dict of the first rank to a file. Without an error,
    # such a file would lose the parts of the other ranks.
    for key, value in values.items():
        if isinstance(value, ShardedValue) and (
            value.world_size > 1 or value.within is not None
        ):
            value.not_alone = f"state {key!r} of {name}"


_FULL = StateDictType.FULL_STATE_DICT


def require_own_parts(
    members: list[Named], saved: dict[str, Any], *, from_first: bool
) -> None:
    """Refuse sharded values of another plan that ranks cannot gather.

    Raises: CheckpointError, naming a state, on all ranks alike.
    """
    for named in members:
        for key, value in saved["state"].get(named.fqn, {}).items():
            # ``part``: a ``Described`` stands for the first rank's sharded value.
            if isinstance(value, ShardedValue) or getattr(value, "part", False):
                problem = _FROM_FIRST if from_first else _mismatch(named, value)
                if problem and (from_first or not _is_gathered(named, value)):
                    raise CheckpointError(
                        f"Optimizer state {key!r} of {quoted(named.fqn)}: {problem}"
                    )


_FROM_FIRST = (
    "expected a whole tensor on the first rank, which gives it to all, got a "
    "ShardedValue. Load sharded values on every rank, with rank0_only=False."
)


def _is_gathered(named: Named, value: ShardedValue) -> bool:
    """Return whether ranks can gather a sharded value of another plan."""
    known = value.home is not None and value.home.group is not None
    return tuple(value.shape) == named.shape and (
        known or (value.world_size == 1 and value.within is None)
    )


def own_part(named: Named, value: ShardedValue) -> Tensor:
    """Return this rank's part of a value that ``require_own_parts`` accepted; no copy.

    Collective: none for a value of the same plan; else as ``ShardedValue.full_tensor``.
    """
    if not _mismatch(named, value):
        return value.local
    # All ranks gather here or no rank does, because the plan of a value is equal on all
    # ranks.
    whole = value.full_tensor()
    return whole if named.ref is None else named.ref.part_of(whole)


def is_of_chunks(value: object) -> bool:
    """Return whether ``value`` is a ``ShardedTensor`` of torch."""
    return type(value).__name__ == "ShardedTensor" and hasattr(value, "local_shards")


def whole_of_chunks(value: Any, device: torch.device) -> Tensor:
    """Return the whole of a ``ShardedTensor`` of torch, on every rank of its group.

    Collective: an all-reduce of the whole over the group.
    """
    whole = torch.zeros(value.shape, dtype=value.dtype, device=device)
    for shard in value.local_shards():
        place = whole
        for dim, (at, size) in enumerate(
            zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        ):
            place = place.narrow(dim, at, size)
        place.copy_(shard.tensor)
    collectives.all_reduce(whole, value._process_group)
    return whole


def _mismatch(named: Named, value: ShardedValue) -> str:
    """Return why ``value`` is not this rank's part; empty if the value is."""
    ref = named.ref
    if ref is None:
        return "expected a whole tensor, because the parameter is not sharded."
    return mismatch(ref, value)


def part_for(named: Named, key: str, value: Any) -> Any:
    """Return this rank's part of a sharded value, a full tensor or a part.

    Returns: a tensor in the shape of the sharded parameter, or a scalar; no copy.

    Raises: CheckpointError, for a sharded value of another plan or another shape.
    """
    if isinstance(value, ShardedValue):
        problem = _mismatch(named, value)
        if problem:
            raise CheckpointError(
                f"Optimizer state {key!r} of {quoted(named.fqn)}: {problem}"
            )
        return value.local
    if is_scalar(key, value, named.shape):
        return value
    # Compare with this rank's shape first: if both shapes are equal, this rank holds
    # the whole parameter, and no cut is needed.
    if value.shape == named.parameter.shape:
        return value
    if tuple(value.shape) == named.shape:
        assert named.ref is not None
        return named.ref.part_of(value)
    if not named.is_cut:
        # State that is not element-wise, of a parameter that this rank holds whole.
        return value
    raise CheckpointError(
        f"Optimizer state {key!r} of {quoted(named.fqn)} has shape "
        f"{tuple(value.shape)}; expected this rank's part, "
        f"{tuple(named.parameter.shape)}, the full shape, {named.shape}, or a scalar. "
        "Load what this rank saved under an equal plan, or what "
        "optim_state_dict_to_load(model, optim, state) returns."
    )
