"""State of experts that are plain parameters, different on each rank of a mesh.

Experts are told apart by their names, so a model that gives each expert the number
that the plain model gives it has a state dict of all experts::

    rank 0    experts.0.weight, experts.1.weight --+--> experts.0 .. experts.3
    rank 1    experts.2.weight, experts.3.weight --+    on both ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from composable_fsdp.comm import collectives
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import listed, quoted


# A leaf of a tree of values, which a named tuple would not be.
@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor without its elements, as ranks tell each other of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def require_own_names(names: Iterable[str], group: dist.ProcessGroup) -> list[str]:
    """Return the names on the other ranks of ``group``; refuse names of two ranks.

    Collective: an all-gather of objects over ``group``.
    Raises: CheckpointError, on all ranks of ``group``.
    """
    told = collectives.all_gather_object(list(names), group)
    _require_different(told)
    mine = group.rank()
    return [name for rank, each in enumerate(told) if rank != mine for name in each]


def _require_different(told: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError if two ranks use a name for different experts."""
    seen: set[str] = set()
    twice = [
        name
        for each in told
        for name in sorted(set(each))
        if name in seen or seen.add(name)  # type: ignore[func-returns-value]  # None
    ]
    if twice:
        names = listed(map(quoted, dict.fromkeys(twice)))
        raise CheckpointError(
            f"State dicts expect another name for each expert; several ranks of the "
            f"expert_mesh hold {names}, and one of them would be lost. Keep the "
            "numbers of the plain model: nn.ModuleList with None in the places of "
            "other ranks' experts. Or stack the experts and pass DTensors of "
            "distribute_tensor(weight, mesh['ep'], [Shard(0)]) without expert_mesh; or "
            "take each rank's own under StateDictType.LOCAL_STATE_DICT."
        )


def from_all_ranks(
    own: Mapping[str, Any],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    to_cpu: bool,
    may_repeat: bool = False,
) -> dict[str, Any]:
    """Return the values of all ranks by name, each as the rank that holds it has it.

    Returns: the values, those of the first rank first.
    Collective: an all-gather of objects and a broadcast per tensor over ``group``.
    Raises: CheckpointError, on all ranks of ``group``, for a name of two ranks.
    """
    told = collectives.all_gather_object(
        {name: tree_map(_described, value) for name, value in own.items()}, group
    )
    # Before the first tensor, so that a refusal sends nothing.
    if not may_repeat:
        _require_different([list(each) for each in told])
    found: dict[str, Any] = {}
    # All ranks go through the descriptions in the same order, and so do the broadcasts.
    for rank, each in enumerate(told):
        for name, value in each.items():
            # In the order of the sender, which the description has.
            parts, tree = tree_flatten(value)
            # Only the sender has elements; the others make room.
            is_here = rank == group.rank()
            held = tree_leaves(own[name]) if is_here else [None] * len(parts)
            got = [
                _sent(part, mine, group, rank, device, to_cpu=to_cpu)
                for part, mine in zip(parts, held, strict=True)
            ]
            found.setdefault(name, tree_unflatten(got, tree))
    return {**found, **own}


def _described(value: Any) -> Any:
    """Return the description of a tensor, any other value as it is."""
    if isinstance(value, Tensor) and value.dim():
        return _Described(tuple(value.shape), value.dtype)
    # Numbers, such as a step, travel as they are.
    return value.cpu() if isinstance(value, Tensor) else value


def _sent(
    told: Any,
    mine: Any,
    group: dist.ProcessGroup,
    rank: int,
    device: torch.device,
    *,
    to_cpu: bool,
) -> Any:
    """Return a value of ``rank``, by a broadcast if the value is a described tensor."""
    if not isinstance(told, _Described):
        return told if mine is None else mine
    # As in plain torch, a model on meta has a state dict of names and shapes.
    if device.type == "meta":
        return torch.empty(told.shape, dtype=told.dtype, device=device)
    if mine is not None:
        collectives.broadcast(mine.to(device).contiguous(), group, rank=rank)
        return mine
    value = torch.empty(told.shape, dtype=told.dtype, device=device)
    collectives.broadcast(value, group, rank=rank)
    return value.cpu() if to_cpu else value


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
