"""Units of which other ranks hold other parts: experts, and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch.distributed as dist

from composable_fsdp.errors import CheckpointError, CompositionError, PlanError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import slot_path
from composable_fsdp.naming import quoted, ranks_text

Route = tuple[dist.ProcessGroup, ...]
"""Groups over which a result travels in turn, as far as the unit's elements reach."""


def require_one_world(handles: Iterable[FlatParamHandle], what: str) -> None:
    """Raise CompositionError if units have gradients of the data of other ranks."""
    # One unit stands for all of its groups.
    units = list({(h.groups.names, h.data_ranks): h for h in [*handles][::-1]}.values())
    if len(units) < 2:
        return
    first = max(units, key=attrgetter("data_ranks"))
    for other in units:
        if not _same_data(first, other):
            raise CompositionError(
                f"{what} got units with gradients over different ranks: "
                f"{_over(first)}, {_over(other)}. If the ranks of the second hold "
                "different experts, stack them as DTensors of "
                "distribute_tensor(weight, mesh['ep'], [Shard(0)]). Else shard both "
                f"over the same ranks, or call {what} for each."
            )


def _same_data(first: FlatParamHandle, other: FlatParamHandle) -> bool:
    """Return whether the gradients of two units are over the data of the same ranks."""
    # Equal numbers of the same ranks, or of other ranks of a larger world.
    count = first.data_ranks
    if count != other.data_ranks:
        return False
    if count == dist.get_world_size():
        return True
    mine, theirs = first.groups.ranks, other.groups.ranks
    # Of a grid of ranks only this rank's row and column are known, and of experts only
    # the ranks with equal ones: both must lie in the ranks of a single group.
    if len(mine) == count or len(theirs) == count:
        return mine <= theirs or theirs <= mine
    return True


def _over(handle: FlatParamHandle) -> str:
    """Return a unit with its ranks, in words."""
    return f"{handle.name} over {ranks_text(sorted(handle.groups.ranks))}"


def require_all_data(handle: FlatParamHandle, top: FlatParamHandle, what: str) -> None:
    """Raise CheckpointError for a trained unit that ranks outside of it train apart."""
    rule = handle.rule
    # The DTensors say where a part lies, and hooks may reduce over further ranks.
    if handle.layout.forms or rule.hook is not None or rule.after_sum is not None:
        return
    ranks = handle.data_ranks
    if handle.layout.trainable and 1 < ranks < top.data_ranks:
        raise CheckpointError(
            f"{what} expects units over the ranks of the model, or experts that are "
            f"DTensors; {_over(handle)} is trained by {ranks} ranks of "
            f"{top.data_ranks}. Stack the experts as DTensors of "
            "distribute_tensor(weight, mesh['ep'], [Shard(0)]), or take each rank's "
            "own under StateDictType.LOCAL_STATE_DICT."
        )


def refuse_forms(handles: Iterable[FlatParamHandle], what: str) -> None:
    """Raise PlanError, naming a parameter, if a unit holds parameters with a form."""
    for handle in handles:
        for region in handle.layout.regions:
            for slot in region.layout.parameters:
                # The first one is enough: all others have the same way out.
                if slot.whole is not None:
                    raise PlanError(
                        f"{what} expects parameters that are not cut by tensor "
                        f"parallelism; parameter {quoted(slot_path(handle, slot))} is "
                        f"{slot.whole}. state_dict() under FULL_STATE_DICT and "
                        "get_full_param(module, name) return whole values."
                    )
