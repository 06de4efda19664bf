"""Process groups that this package creates: of nodes, private, and for reductions.

Hybrid units without given groups shard within a node and replicate across nodes::

    8 ranks, LOCAL_WORLD_SIZE=4      shard      0 1 2 3 | 4 5 6 7
                                     replicate  0 4 | 1 5 | 2 6 | 3 7

Private groups serve exchanges of host memory beside training. Twins have the ranks and
the backend of another group, and a communicator of their own.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import product
from math import prod

import torch.distributed as dist

# The functions of this module keep the default group of the first import as a default
# argument for ever, whose threads now and then abort the process at its exit. Before
# any group exists the default is None.
import torch.distributed.nn.functional  # noqa: F401  # for its time of import
from torch.distributed import distributed_c10d

from composable_fsdp.comm.agreement import AgreedName, group_timeout
from composable_fsdp.comm.groups import PEERLESS, Groups, RankLayout
from composable_fsdp.comm.placements import (
    REPLICATE,
    SHARD,
    Choice,
    Dims,
    Grid,
    Ways,
    grid_of,
    name_of,
)
from composable_fsdp.config import HYBRID
from composable_fsdp.errors import PlanError

TIMEOUT_VARIABLE = "COMPOSABLE_FSDP_CHECKPOINT_TIMEOUT"
"""Environment variable: seconds that a rank waits for the others in ``save`` and
``load``. Default: the timeout of the model's process group."""

VARIABLE = "LOCAL_WORLD_SIZE"
"""Environment variable, set by torchrun: the number of ranks per node."""

_made: dict[tuple[tuple[int, ...], str], weakref.ref[dist.ProcessGroup]] = {}
"""Groups created here, by global ranks and purpose."""


def node_size(world_size: int) -> int:
    """Return the number of ranks per node, from ``LOCAL_WORLD_SIZE``.

    Raises: PlanError, if the variable is not set or does not divide ``world_size``.
    """
    if world_size == 1:
        return 1
    text = os.environ.get(VARIABLE, "")
    size = int(text) if text.isdecimal() else 0
    if not size or world_size % size:
        raise PlanError(
            "HYBRID_SHARD without process_group and device_mesh shards within a node, "
            f"and expects in {VARIABLE} the node's number of ranks, which divides the "
            f"world size {world_size}; got {text or 'nothing'}. Start the script with "
            "torchrun, which sets it, or pass a 2-D device_mesh (replicate, shard)."
        )
    return size


@lru_cache(maxsize=64)  # asked for each unit
def group_sizes(
    chosen: Choice, *, world_size: int, shard_world_size: int | None = None
) -> Ways:
    """Return the numbers of ranks of a unit on a grid (replicate, shard).

    Raises: PlanError, if a hybrid strategy gets no ``shard_world_size``.
    """
    if shard_world_size is None and chosen in HYBRID:
        # The number of nodes is unknown here, so the plan cannot choose the groups that
        # a hybrid strategy chooses by itself.
        raise PlanError(
            f"A plan with {name_of(chosen)} expects shard_world_size, the ranks that "
            "share the parameters. Pass the size of the mesh's shard dim, or of a node."
        )
    size = shard_world_size or world_size
    return grid_of({REPLICATE: world_size // size, SHARD: size}).ways(chosen)


def _grid(ranks: RankLayout, chosen: Choice) -> tuple[Grid, Sequence[int] | None]:
    """Return the grid of a unit, and its global ranks; None for a pair of groups.

    Raises: PlanError, if a hybrid strategy has no groups to replicate over.
    """
    if chosen not in HYBRID or ranks.replicate is not None:
        return ranks.grid, ranks.members
    if not ranks.by_node:
        raise PlanError(
            f"{name_of(chosen)} expects a 2-D device_mesh (replicate, shard) or "
            "a tuple (shard group, replicate group); got one group. Pass one "
            "of the two, or neither to shard within a node."
        )
    size = node_size(ranks.world_size)
    return grid_of({REPLICATE: ranks.world_size // size, SHARD: size}), ranks.members


def sizes_for(ranks: RankLayout, chosen: Choice) -> Ways:
    """Return the numbers of ranks of a unit.

    Raises: PlanError, if the placement is not possible on these ranks.
    """
    # Each unit asks: a single look-up, which hashes in Python.
    known = ranks.ways.get(chosen)
    if known is not None:
        return known
    grid, members = _grid(ranks, chosen)
    dims, _ = grid.place(chosen)
    if members is None:
        for names in (dims.states, dims.others, *dims.steps):
            _of_pair(ranks, names, grid, dims)
    ways = grid.ways(chosen)
    # Not kept: the environment says how large nodes are.
    if not (ranks.by_node and chosen in HYBRID):
        ranks.ways[chosen] = ways
    return ways


def groups_for(ranks: RankLayout, chosen: Choice) -> Groups:
    """Return the groups of a unit; units with equal placements share them.

    Collective: creates the groups that the caller has not given, at the first call for
        a placement; all ranks must call, as of ``twin_group``.
    Raises: PlanError, as ``sizes_for``.
    """
    made = ranks.groups.get(chosen)
    if made is not None:
        for ref in (made.scatter_ref, made.sum_ref, made.kept_ref, made.spread_ref):
            # The program may have destroyed groups that were made here.
            if ref not in (None, made.shard_ref, made.replicate_ref) and (
                ref.ref() not in distributed_c10d._world.pg_group_ranks
            ):
                break
        else:
            return made
    grid, members = _grid(ranks, chosen)
    dims, sizes = grid.place(chosen)
    by_node = ranks.by_node and chosen in HYBRID
    given = (None, None) if by_node else (ranks.shard, ranks.replicate)
    known = dict(zip((grid.roles[SHARD], grid.roles[REPLICATE]), given, strict=True))

    def over(names: tuple[str, ...]) -> dist.ProcessGroup | None:
        if prod(sizes[name] for name in names) == 1:
            return None
        if members is None:
            return _of_pair(ranks, names, grid, dims)
        group = known.get(names)
        if group is not None and sizes == grid.sizes:
            return group
        # The ranks that differ from this one in ``names`` alone, in this order.
        strides, stride = {}, 1
        for name in reversed(sizes):
            strides[name], stride = stride, stride * sizes[name]
        first = at = members.index(dist.get_rank())
        for name in names:
            first -= at // strides[name] % sizes[name] * strides[name]
        steps = [range(0, sizes[name] * strides[name], strides[name]) for name in names]
        row = tuple(members[first + sum(each)] for each in product(*steps))
        everyone, like = dist.group.WORLD, ranks.shard
        assert everyone is not None
        if row == tuple(range(everyone.size())):
            return everyone
        seconds = group_timeout(like)
        return _own_group(row, "placement", dist.get_backend(like), seconds)

    steps = [over(names) for names in dims.steps]
    groups = Groups(over(dims.states), over(dims.others), steps)
    # Not kept: the groups of the nodes may be destroyed before the default group.
    if not by_node:
        ranks.groups[chosen] = groups
    return groups


def _of_pair(
    ranks: RankLayout, names: tuple[str, ...], grid: Grid, dims: Dims
) -> dist.ProcessGroup | None:
    """Return the group over ``names``, if a pair of groups tells its ranks."""
    shard, replicate = ranks.shard, ranks.replicate
    for role, group in ((SHARD, shard), (REPLICATE, replicate), ("", None)):
        if names == grid.roles.get(role, ()):
            return group
    # All ranks; their order in the default group must not matter to the pieces.
    assert replicate is not None
    group = replicate if shard.size() == 1 else dist.group.WORLD
    group = shard if replicate.size() == 1 else group
    is_cut = dims.steps[2] or dims.gradients not in ((), dims.states)
    if is_cut or group is None or group.size() != ranks.world_size:
        raise PlanError(
            "A placement over all ranks of two groups, as NO_SHARD, expects groups "
            "that make up the default group, and that no part of the ranks divides "
            f"other things; the two hold {ranks.world_size} ranks together. Pass a "
            f"device_mesh, or one group or a 1-D mesh of the {ranks.world_size} ranks."
        )
    return group


def private_group(
    ranks: tuple[int, ...], purpose: str, timeout: float | None = None
) -> dist.ProcessGroup | None:
    """Return a gloo group of the global ``ranks`` for ``purpose``; None for one rank.

    Collective: creates the group at the first call; other ranks need not call.
    """
    # No other code sends on the group, so it can be used beside training, and by
    # another thread if the thread has a purpose of its own.
    if len(ranks) == 1:
        return None
    assert dist.group.WORLD is not None
    # torch's own default of 30 minutes would outlive the model's groups.
    told = os.environ.get(TIMEOUT_VARIABLE) or timeout
    return _own_group(
        ranks, purpose, "gloo", float(told or group_timeout(dist.group.WORLD))
    )


def twin_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """Return another group of the same ranks, backend and timeout, for ``purpose``.

    Collective: creates the group at the first call; all ranks of ``group`` must call.
        NCCL with ``init_process_group(device_id=...)`` divides the communicator of the
        default group, all ranks of which must then make a group at the same time.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    return _own_group(ranks, purpose, dist.get_backend(group), group_timeout(group))


def _own_group(
    ranks: tuple[int, ...], purpose: str, backend: str, seconds: float
) -> dist.ProcessGroup:
    """Return a group of some ranks of the default group, made at the first call."""
    key = f"{purpose} {backend}"
    made = _made.get((ranks, key))
    known = made() if made is not None else None
    # The weak reference is not sufficient: another object may keep a destroyed group
    # alive on this rank and not on another. What torch.distributed knows is equal.
    if known is not None and known in distributed_c10d._world.pg_group_ranks:
        return known
    described, everyone = f"composable_fsdp {purpose}", dist.group.WORLD
    assert everyone is not None
    # As ``new_group``: with a device NCCL divides the communicator of the default group
    # here, where all ranks come, and not in the first collective, which a replica may
    # send alone.
    device = None if backend == "gloo" else everyone.bound_device_id
    # ``new_group(use_local_synchronization=True)`` derives the name from the number of
    # groups that a process knows, which differs between ranks, and torch's other names
    # are in the store of torchrun already after a restart.
    if backend in PEERLESS:
        name = f"{described} {len(distributed_c10d._world.pg_names)}"
    else:
        name = AgreedName(described, ranks).agree(seconds)
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        distributed_c10d._get_default_store(),
        name,  # type: ignore[arg-type]  # torch's GroupName
        timeout=timedelta(seconds=seconds),
        device_id=device,
        group_desc=described,
    )
    # ``_new_process_group_helper`` does not register the ranks of the group;
    # ``new_group`` does so after the helper.
    places = {rank: i for i, rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[group] = places
    _made[ranks, key] = weakref.ref(group)
    return group
