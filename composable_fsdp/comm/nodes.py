"""Groups that are made here: those of nodes, and private ones of host memory.

Hybrid units that were given no groups shard within a node and replicate across.

::

    8 ranks, LOCAL_WORLD_SIZE=4      shard      0 1 2 3 | 4 5 6 7
                                     replicate  0 4 | 1 5 | 2 6 | 3 7

Every process makes all of them, once, in this order. They are found again as long as
torch.distributed knows them, so units that are sharded in calls of their own share
them.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from composable_fsdp.errors import PlanError

VARIABLE = "LOCAL_WORLD_SIZE"

_made: dict[tuple[tuple[int, ...], str], weakref.ref[dist.ProcessGroup]] = {}
"""Groups made here, by global ranks and purpose."""


def node_size(world_size: int) -> int:
    """Ranks on one node, from ``LOCAL_WORLD_SIZE``. Only reads.

    Raises: PlanError, if it is not set, or does not divide ``world_size``.
    """
    if world_size == 1:
        return 1
    text = os.environ.get(VARIABLE, "")
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(
            "HYBRID_SHARD without process_group and device_mesh shards within a node, "
            f"and expects the node's number of ranks in {VARIABLE}, which is "
            f"{text or 'not set'}. Start the script with torchrun, which sets it, or "
            "pass a 2-D device_mesh (replicate, shard)."
        )
    size = int(text)
    if world_size % size:
        raise PlanError(
            f"HYBRID_SHARD without process_group and device_mesh expects nodes of "
            f"equal size; {VARIABLE}={size} does not divide the world size "
            f"{world_size}. Pass a 2-D device_mesh (replicate, shard)."
        )
    return size


def node_groups(
    world_size: int,
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's (shard, replicate) groups; ``None`` for a group of one rank.

    Ranks of a node are consecutive, as torchrun numbers them.

    Collective: makes the groups at the first call in a process; none later. All ranks
    of the default group must call.
    Raises: PlanError, as ``node_size``.
    """
    size = node_size(world_size)
    starts = range(0, world_size, size)
    return (
        _group_among([range(start, start + size) for start in starts]),
        _group_among([range(i, world_size, size) for i in range(size)]),
    )


def _group_among(parts: Sequence[range]) -> dist.ProcessGroup | None:
    """The group of the part that holds this rank; all parts have one size."""
    if len(parts) == 1:
        return dist.group.WORLD
    if len(parts[0]) == 1:
        return None
    (mine,) = [tuple(part) for part in parts if dist.get_rank() in part]
    known = _known(mine, "")
    if known is None:
        made = {tuple(part): dist.new_group(list(part)) for part in parts}
        known = made[mine]
        _made[mine, ""] = weakref.ref(known)
    return known


def _known(ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup | None:
    made = _made.get((ranks, purpose))
    group = made() if made is not None else None
    if group is None:
        return None
    try:
        # Something else may keep a destroyed group alive on this rank and not on
        # another; whether torch.distributed knows it is the same on all.
        dist.get_global_rank(group, 0)
    except ValueError:
        return None
    return group


def private_group(ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup | None:
    """A gloo group of these global ranks for one purpose; None for a single rank.

    Nothing else is sent on it, so it may be used beside whatever training sends, and
    by another thread if that has a purpose of its own.

    Collective: makes the group at the first call; none later. All of ``ranks`` must
    call, and nobody else has to.
    """
    if len(ranks) == 1:
        return None
    group = _known(ranks, purpose)
    if group is None:
        described = f"composable_fsdp {purpose}"
        if len(ranks) == dist.get_world_size():
            group = dist.new_group(backend="gloo", group_desc=described)
        else:
            group = _group_of_some(ranks, described)
        assert group is not None
        _made[ranks, purpose] = weakref.ref(group)
    return group


_count: Counter[str] = Counter()


def _group_of_some(ranks: tuple[int, ...], described: str) -> dist.ProcessGroup:
    """A gloo group that only its own ranks make.

    ``new_group(use_local_synchronization=True)`` names it by how many groups a process
    knows. Ranks that are in different groups count differently, and then wait for each
    other under different names. So this gives the name, by what its ranks have in
    common. Private names of torch, checked on 2.13.
    """
    name = f"{described} {' '.join(map(str, ranks))}"
    _count[name] += 1
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend("gloo"),
        distributed_c10d._get_default_store(),
        f"{name} {_count[name]}",  # type: ignore[arg-type]  # its own kind of str
        timeout=distributed_c10d.default_pg_timeout,
        group_desc=described,
    )
    places = {rank: i for i, rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[group] = places
    return group
