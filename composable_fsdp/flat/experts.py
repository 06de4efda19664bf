"""Units over other ranks than the units around them: experts on a mesh of their own.

The ranks of ``ep`` hold different experts and send each other tokens, so a rank's
experts have gradients of the losses of all ranks of ``ep`` before any reduction::

    4 ranks, mesh (edp 2, ep 2)     gradient of a rank     reduced over    losses in all
    the model                       1 loss                 4 ranks         4
    its experts                     2 losses               2 ranks, edp    4

Both are divided by 4. The norm of all gradients is a sum over ``edp`` and over ``ep``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from math import prod
from operator import attrgetter

import torch.distributed as dist

from composable_fsdp.errors import CheckpointError, CompositionError
from composable_fsdp.flat.build import set_divisions
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join_name, listed, quoted, ranks_named

Units = Sequence[tuple[str, FlatParamHandle]]
"""Units with their names from the outermost unit."""


Route = tuple[dist.ProcessGroup, ...]
"""The groups whose ranks hold other elements of a parameter; none if all are here."""


def route_of(handle: FlatParamHandle, slot: int) -> Route:
    """Return the groups over which the norm of a parameter's gradient is a sum."""
    cut, form = handle.groups.cut, handle.layout.forms.get(slot)
    if form is None:
        return cut
    # Replicas have equal gradients, as have the ranks of a mesh that does not cut.
    known = form.mesh_groups
    return (*(group for group in cut if group not in known), *form.cut_over)


def count_expert_ranks(top: FlatParamHandle, units: Units) -> None:
    """Set how many ranks' tokens the experts of each unit compute.

    An ``expert_mesh`` says how many. Without an ``expert_mesh``, a unit of DTensors
    over fewer ranks than the outermost unit ``top`` holds experts: the ranks that its
    DTensors are cut over have data of their own. The ranks of tensor parallelism have
    the data of this rank, and their units have the ranks of ``top``.

    Raises: CompositionError, if the meshes do not multiply to the ranks of ``top``, or
    for a trainable plain parameter beside such DTensors; no unit is then changed.
    """
    found = [
        (handle, _expert_ranks(top, name, handle))
        for name, handle in units
        if handle.layout.forms or handle.groups.experts is not None
    ]
    for handle, ranks in found:
        # A copy of a unit, and a tree that was made again, have the number already.
        if handle.rule.expert_ranks != ranks:
            handle.rule.expert_ranks = ranks
            set_divisions(handle)


def _expert_ranks(top: FlatParamHandle, name: str, handle: FlatParamHandle) -> int:
    """Return how many ranks' tokens a unit of experts computes.

    Raises: as ``count_expert_ranks``.
    """
    # Sizes, which are equal on all ranks: all raise or none.
    own, everyone = handle.groups.world_size, top.groups.world_size
    told = handle.groups.expert_ranks
    if told > 1:
        # A tree may hold nothing but experts.
        if handle is not top and top.groups.expert_ranks == 1:
            _require_product(name, own, told, everyone)
        return told
    if own == everyone:
        return 1
    forms = handle.layout.forms
    # All mesh dims that cut any parameter, each once.
    cuts = dict.fromkeys(chain(*(forms[index].cut_over for index in sorted(forms))))
    sizes = [group.size() for group in cuts]
    # Experts may be cut by tensor parallelism, too, whose ranks have no other data.
    products = {
        prod(chosen)
        for count in range(len(sizes) + 1)
        for chosen in combinations(sizes, count)
    }
    if all(own * count != everyone for count in products):
        raise CompositionError(
            f"Unit {quoted(name)} holds DTensors over {listed(sizes) or 1} ranks and "
            f"is sharded over {own}; the model is sharded over {everyone}. Expected "
            "that the numbers multiply to that of the model, so that all data reaches "
            "each expert. Make one mesh of all data ranks, (edp, ep): distribute the "
            "experts over mesh['ep'], and pass mesh['edp'] to their fully_shard."
        )
    _refuse_plain(name, handle)
    return everyone // own


def _require_product(name: str, own: int, told: int, everyone: int) -> None:
    """Raise CompositionError unless the model is sharded over ``own * told`` ranks."""
    if own * told != everyone:
        raise CompositionError(
            f"Unit {quoted(name)} has an expert_mesh of {told} ranks and is sharded "
            f"over {own}; the model is sharded over {everyone}. Expected that the "
            "numbers multiply to that of the model, so that all data reaches each "
            "expert. Make one mesh of all data ranks, (edp, ep), and pass "
            "device_mesh=mesh['edp'], expert_mesh=mesh['ep']."
        )


def _refuse_plain(name: str, handle: FlatParamHandle) -> None:
    """Raise CompositionError for a trainable plain parameter beside DTensor experts."""
    for region in handle.layout.trainable:
        for slot in region.layout.parameters:
            if slot.whole is None:
                # Its gradients would be summed over a part of the data ranks only.
                raise CompositionError(
                    f"Parameter {quoted(join_name(name, slot.fqn))} is plain, in a "
                    "unit of DTensors over other ranks: its gradient would be summed "
                    f"over {handle.groups.world_size} ranks alone, and another on the "
                    "others. Make it a DTensor over the same mesh (Replicate), or move "
                    "it out of the unit."
                )


def require_one_world(handles: Iterable[FlatParamHandle], what: str) -> None:
    """Raise CompositionError if units have gradients of the data of other ranks.

    Their norm would be another number on each rank, and no norm of any model.

    Collective: none; groups are alike on all ranks, and so is the result.
    """
    # One unit stands for all of its groups.
    units = list({(h.groups.names, h.data_ranks): h for h in [*handles][::-1]}.values())
    if len(units) < 2:
        return
    first = max(units, key=attrgetter("data_ranks"))
    for other in units:
        if not _same_data(first, other):
            raise CompositionError(
                f"{what} got units with gradients over different ranks: "
                f"{_over(first)}, {_over(other)}. No rank has the whole sum. If the "
                "ranks of the second hold different experts, pass them to fully_shard "
                "with expert_mesh=mesh['ep'], or as DTensors of "
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
    return f"{handle.name} over {ranks_named(sorted(handle.groups.ranks))}"


def count_common(
    chosen: Mapping[int, object], handles: Iterable[FlatParamHandle]
) -> int:
    """Return how many of ``chosen`` are on all ranks: all but those of plain experts.

    Ranks with other experts may hold other numbers of them.
    """
    # Clipping calls this in every step; most models have no such unit.
    own = [
        leaf
        for handle in handles
        if handle.groups.experts_ref is not None
        for leaf in handle.leaves
    ]
    return len(chosen) - sum(id(leaf) in chosen for leaf in own)


def require_all_data(handle: FlatParamHandle, top: FlatParamHandle, what: str) -> None:
    """Raise CheckpointError for a trained unit that ranks outside of it train apart.

    The same names then stand for other values on other ranks, and a state dict would
    keep those of some ranks.

    Collective: none; numbers of ranks are alike on all ranks.
    """
    rule = handle.rule
    # The DTensors say where a part lies, and hooks may reduce over further ranks.
    if handle.layout.forms or rule.hook is not None or rule.after_sum is not None:
        return
    if handle.layout.trainable and handle.data_ranks < top.data_ranks:
        raise CheckpointError(
            f"{what} expects units over the ranks of the model, or experts that say "
            f"so; {_over(handle)} is trained by {handle.data_ranks} ranks of "
            f"{top.data_ranks}, so other ranks have other values under the same names "
            "and would lose them. Pass expert_mesh=mesh['ep'] to fully_shard, or "
            "DTensors of distribute_tensor(weight, mesh['ep'], [Shard(0)]); or take "
            "each rank's own under StateDictType.LOCAL_STATE_DICT."
        )
