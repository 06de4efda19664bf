"""Optimizer state for a checkpoint: the elements of this rank, or scalars."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.scalars import is_scalar
from composable_fsdp.storage.contents import HeldParam, HeldTensor
from composable_fsdp.storage.mesh_copies import local_state
from composable_fsdp.storage.readable import require_readable


def readable_state(value: Any, held: HeldParam | HeldTensor, key: str) -> Any:
    """Return a state with the elements of this rank.

    Raises: CheckpointError, for a tensor without values in memory of its own.
    """
    # Numbers and texts have no memory that could be read wrongly.
    if not isinstance(value, Tensor):
        return value
    where = f"{held.names[0]} (state {key!r})"
    require_readable(value, where, "save")
    return local_state(value, held.tensor, where)


def is_elementwise(name: str, value: Any, leaf: Tensor, fqn: str) -> bool:
    """Return whether ``value`` has an element for each element of the shard.

    If not, the state has the same value on all ranks.

    Raises: CheckpointError, for a tensor that is neither a scalar nor element-wise.
    """
    if is_scalar(name, value, leaf.shape):
        return False
    if value.shape == leaf.shape:
        return True
    raise CheckpointError(
        f"Optimizer state {name!r} of {quoted(fqn)} has shape {tuple(value.shape)}; "
        f"expected a number or the shape of this rank's shard, {tuple(leaf.shape)}. "
        "State that is not element-wise, or was made before fully_shard, cannot be "
        "saved in shards: use an element-wise optimizer, and make it hold state only "
        "after fully_shard."
    )
