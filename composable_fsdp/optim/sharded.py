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
from composable_fsdp.state_dict.full import mismatch, sharded_value
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _get_module_fsdp_state


def as_sharded(named: Named, value: Any) -> Any:
    """Return this rank's ``value`` as a ``ShardedValue``; scalars stay as they are."""
    is_part = isinstance(value, Tensor) and value.shape == named.parameter.shape
    # Of a parameter that this rank holds whole, state may have any shape.
    return sharded_value(named.ref, value) if named.ref and is_part else value


def mark_partial(handle: FlatParamHandle, values: dict[str, Any], name: str) -> None:
    """Forbid pickling of sharded values if the unit's state dict type is full."""
    unit = _get_module_fsdp_state(handle.layout.owners[0])
    kind = None if unit is None else unit.settings.state_dict.state_dict_type
    for key, value in values.items() if kind is StateDictType.FULL_STATE_DICT else ():
        if isinstance(value, ShardedValue) and value.is_partial:
            value.not_alone = f"state {key!r} of {name}"


def part_problem(named: Named, value: Any, *, from_first: bool) -> str:
    """Return why ranks can neither take nor gather a sharded value; else empty."""
    # ``part``: a ``Described`` stands for the first rank's sharded value.
    if not isinstance(value, ShardedValue) and not getattr(value, "part", False):
        return ""
    if from_first:
        return (
            "expected a whole tensor on the first rank, which gives it to all, got a "
            "ShardedValue. Load sharded values on every rank, with rank0_only=False."
        )
    known = value.home is not None and value.home.group is not None
    is_gathered = tuple(value.shape) == named.shape and (known or not value.is_partial)
    return "" if is_gathered else _mismatch(named, value)


def _mismatch(named: Named, value: ShardedValue) -> str:
    """Return why ``value`` is not this rank's part; empty if the value is."""
    if named.ref is None:
        return "expected a whole tensor, because the parameter is not sharded."
    return mismatch(named.ref, value)


def whole_of_other(named: Named, value: Any, device: torch.device) -> Any:
    """Return the whole of a sharded value of another plan; other values unchanged.

    Collective: as ``ShardedValue.full_tensor``, on all ranks or on none, because the
        plan of a value is equal on all ranks; an all-reduce of a ``ShardedTensor``.
    """
    if isinstance(value, ShardedValue) and _mismatch(named, value):
        return value.full_tensor()
    # Of torch's older reader.
    if type(value).__name__ == "ShardedTensor" and hasattr(value, "local_shards"):
        whole = torch.zeros(value.shape, dtype=value.dtype, device=device)
        for shard in value.local_shards():
            box = shard.metadata
            place = zip(box.shard_offsets, box.shard_sizes, strict=True)
            whole[tuple(slice(at, at + size) for at, size in place)] = shard.tensor
        collectives.all_reduce(whole, value._process_group)
        return whole
    return value


def part_for(named: Named, key: str, value: Any) -> Any:
    """Return this rank's part of a sharded value, a full tensor or a part; no copy."""
    if isinstance(value, ShardedValue):
        problem = _mismatch(named, value)
        if problem:
            raise CheckpointError(
                f"Optimizer state {key!r} of {quoted(named.fqn)}: {problem}"
            )
        return value.local
    # First this rank's shape: if both are equal, this rank holds the whole parameter.
    if is_scalar(key, value, named.shape) or value.shape == named.parameter.shape:
        return value
    if named.ref is not None and tuple(value.shape) == named.shape:
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
