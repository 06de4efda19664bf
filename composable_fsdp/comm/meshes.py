"""From the groups or the mesh that a caller names to a unit's groups and device.

Private: ``DeviceMesh._flatten``, ``_get_root_mesh``, checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain, product

import torch
import torch.distributed as dist

# The functions of this module keep the default group of the first import as a default
# argument for ever, whose threads now and then abort the process at its exit. Before
# any group exists the default is None.
import torch.distributed.nn.functional  # for its time of import
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm.agreement import AgreedName, group_timeout
from composable_fsdp.comm.groups import (
    PEERLESS,
    GroupRef,
    Groups,
    RankLayout,
    operation_log,
)
from composable_fsdp.comm.placements import (
    REPLICATE,
    REPLICATE_NAMES,
    SHARD,
    Choice,
    Dims,
    Ways,
    grid_of,
    name_of,
    place,
)
from composable_fsdp.config import HYBRID
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import quoted

MODEL_PARALLEL = frozenset({"tp", "ep", "pp", "tensor", "expert", "pipeline"})
"""Usual names of mesh dims whose ranks hold different parts of the model."""
SHARDING = ("shard", "fsdp", "dp", "data", "dp_shard", "cp", "context")
"""Names of mesh dims over which parameters are sharded."""

CHECKPOINT_TIMEOUT = "COMPOSABLE_FSDP_CHECKPOINT_TIMEOUT"
"""Seconds that a rank waits for others in ``save`` and ``load``; else the timeout."""

_made: dict[tuple[tuple[int, ...], str], weakref.ref[dist.ProcessGroup]] = {}
"""Groups created here, by global ranks and purpose."""


def require_process_group(api: str) -> None:
    """Raise CompositionError, naming ``api``, without an initialised process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise CompositionError(
            f"{api} needs a process group and torch.distributed is not initialised. "
            "Start the script with torchrun and call "
            "torch.distributed.init_process_group() first; "
            "composable_fsdp.plan(module, world_size=...) needs neither."
        )


def resolve_ranks(
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
    device_mesh: DeviceMesh | None,
    api: str,
) -> RankLayout:
    """Turn the caller's groups and meshes into a ``RankLayout``."""
    require_process_group(api)
    if process_group is not None and device_mesh is not None:
        raise PlanError(
            "Pass process_group or device_mesh, not both: each names the ranks."
        )
    if device_mesh is not None:
        shard, replicate = _groups_of_mesh(device_mesh)
        # Numbers, made outside of modes: torch makes this tensor at each read, and a
        # simulation refuses one that is not fake.
        with torch._C._DisableTorchDispatch():
            ranks = device_mesh.mesh
            members = ranks.reshape(-1).tolist()
        names = device_mesh.mesh_dim_names or (REPLICATE, SHARD)[-ranks.ndim :]
        grid = grid_of(dict(zip(names, ranks.shape, strict=True)))
        kind = device_mesh.device_type
        return RankLayout(*_refs(shard, replicate), grid, members, kind)
    if isinstance(process_group, (tuple, list)):
        if len(process_group) != 2:
            raise PlanError(
                "A tuple of process groups is (shard group, replicate group); got "
                f"{len(process_group)} groups."
            )
        shard, replicate = map(_member, process_group)
        row, column = map(dist.get_process_group_ranks, (shard, replicate))
        if len(set(row) & set(column)) > 1:
            raise PlanError(
                "A tuple of process groups expects (shard group, replicate group) that "
                f"have one rank in common; got ranks {sorted(row)} and "
                f"{sorted(column)}. Make them the rows and columns of a grid, or pass "
                "a 2-D device_mesh."
            )
        # A rank knows its own row and column; in a mesh the others are parallel.
        members = [below + rank - dist.get_rank() for below in column for rank in row]
        grid = grid_of({REPLICATE: len(column), SHARD: len(row)})
        return RankLayout(*_refs(shard, replicate), grid, members)
    shard = _member(dist.group.WORLD if process_group is None else process_group)
    # Only the default group may be divided by node: the caller's own group is used as
    # given. Units of the same group share a layout, and so ``Groups`` objects.
    known, by_node = operation_log(shard).layouts, process_group is None
    if by_node not in known:
        members = dist.get_process_group_ranks(shard)
        grid = grid_of({SHARD: len(members)})
        known[by_node] = RankLayout(*_refs(shard), grid, members, by_node=by_node)
    return known[by_node]


def _refs(
    shard: dist.ProcessGroup, replicate: dist.ProcessGroup | None = None
) -> tuple[GroupRef, GroupRef | None]:
    """Return references to the groups."""
    return operation_log(shard), None if replicate is None else operation_log(replicate)


def _member(group: object) -> dist.ProcessGroup:
    """Return ``group``; raise if ``group`` is no process group of this rank."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise PlanError(
            f"Rank {dist.get_rank()} is not in the process group it was given. Call "
            "fully_shard only on the ranks of the group."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group expects a torch.distributed.ProcessGroup, got "
            f"{type(group).__name__}."
        )
    return group


def _groups_of_mesh(
    mesh: DeviceMesh,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the groups of a 1-D mesh, a 2-D mesh (replicate, shard), or by names."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh expects a DeviceMesh, got {type(mesh).__name__}. Make one "
            "with torch.distributed.device_mesh.init_device_mesh."
        )
    names = mesh.mesh_dim_names or ()
    # A mesh that is no part of a larger one may have any name.
    if mesh.ndim == 2 or (mesh.ndim == 1 and mesh._get_root_mesh().ndim > 1):
        _refuse_others(mesh, [name for name in names if name not in MODEL_PARALLEL])
    if mesh.ndim == 1:
        return _member(mesh.get_group()), None
    if mesh.ndim == 2:
        first, second = names or ("", "")
        # A mesh with the dims in the other order would silently shard over the
        # replicas.
        if "shard" in first or "replicate" in second:
            raise PlanError(
                "A 2-D device_mesh expects dimension 0 to replicate and dimension 1 to "
                f"shard; got dimensions named {first!r} and {second!r}. Make it as "
                "init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))."
            )
        return _member(mesh.get_group(1)), _member(mesh.get_group(0))
    # Unknown names are refused and not guessed: a wrong guess would average gradients
    # of different parameters.
    _refuse_others(
        mesh, [name for name in names if name in (*SHARDING, *REPLICATE_NAMES)]
    )
    shard, replicate = _one_dim(mesh, SHARDING), _one_dim(mesh, REPLICATE_NAMES)
    if shard is None:
        _refuse_others(mesh, None)
    assert shard is not None
    return shard, replicate


def _one_dim(mesh: DeviceMesh, kind: Sequence[str]) -> dist.ProcessGroup | None:
    """Return the group of all dims with a name in ``kind``; None without any."""
    dims = tuple(name for name in mesh.mesh_dim_names or () if name in kind)
    if not dims:
        return None
    # torch keeps a flattened mesh, so that all units get the same process group.
    found = mesh[dims[0]] if len(dims) == 1 else mesh[dims]._flatten()
    return _member(found.get_group())


def _refuse_others(mesh: DeviceMesh, known: Sequence[str] | None) -> None:
    """Raise PlanError if the mesh has dims other than ``known``."""
    names = mesh.mesh_dim_names or ()
    if known is not None and len(known) == len(names):
        return
    # Ranks of such a dim compute other values: as shard ranks they would silently
    # average gradients of different parameters.
    told = f"dims named {', '.join(map(quoted, names))}" if names else "no names"
    kept = ", ".join(map(quoted, known or ()))
    rest = f" Of this mesh pass mesh[{kept}]." if kept else ""
    raise PlanError(
        "device_mesh expects a 1-D mesh, a 2-D mesh (replicate, shard), or more dims "
        f"with mesh_dim_names {', '.join(SHARDING)}, which shard, and "
        f"{', '.join(REPLICATE_NAMES)}, which replicate; got {mesh.ndim}-D, {told}: "
        f"{mesh}. Dims whose ranks hold different parts of the model (tp, ep, pp) must "
        f"not be passed.{rest} If ranks hold equal parameters (context parallelism), "
        "flatten: mesh['dp', 'cp']._flatten('dp_cp')."
    )


def dims_for(ranks: RankLayout, chosen: Choice) -> Dims:
    """Return the dims of a unit's placement on its ranks; PlanError, if it has none."""
    if chosen not in HYBRID or ranks.replicate is not None:
        return place(ranks.grid, chosen)
    if not ranks.by_node:
        raise PlanError(
            f"{name_of(chosen)} expects a 2-D device_mesh (replicate, shard) or "
            "a tuple (shard group, replicate group); got one group. Pass one "
            "of the two, or neither to shard within a node."
        )
    text, world_size = os.environ.get("LOCAL_WORLD_SIZE", ""), ranks.world_size
    size = int(text) if text.isdecimal() else 0
    if world_size > 1 and (not size or world_size % size):
        raise PlanError(
            "HYBRID_SHARD without process_group and device_mesh shards within a node, "
            "and expects in LOCAL_WORLD_SIZE the node's number of ranks, which divides "
            f"the world size {world_size}; got {text or 'nothing'}. Start the script "
            "with torchrun, which sets it, or pass a 2-D device_mesh (replicate, "
            "shard)."
        )
    size = 1 if world_size == 1 else size
    return place(grid_of({REPLICATE: world_size // size, SHARD: size}), chosen)


def sizes_for(ranks: RankLayout, chosen: Choice) -> Ways:
    """Return the numbers of ranks of a unit. Raises: PlanError, as ``dims_for``."""
    known = ranks.ways.get(chosen)
    if known is None:
        known = dims_for(ranks, chosen).ways
        # Not kept: the environment says how large nodes are.
        if not (ranks.by_node and chosen in HYBRID):
            ranks.ways[chosen] = known
    return known


def groups_for(ranks: RankLayout, chosen: Choice) -> Groups:
    """Return the groups of a unit; units with equal placements share them.

    Collective: creates groups that the caller has not given, on all ranks, once each.
    """
    if (made := ranks.groups.get(chosen)) is not None:
        for ref in (made.scatter_ref, made.sum_ref, made.kept_ref, made.spread_ref):
            # The program may have destroyed groups that were made here.
            if ref not in (None, made.shard_ref, made.replicate_ref) and (
                ref.ref() not in distributed_c10d._world.pg_group_ranks
            ):
                break
        else:
            return made
    dims = dims_for(ranks, chosen)
    sizes, grid, members = dims.sizes, ranks.grid, ranks.members
    by_node = ranks.by_node and chosen in HYBRID

    def several(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if sizes[name] > 1)

    known: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
    if not by_node and sizes == dict(grid.dims):
        known[several(grid.replicate)] = ranks.replicate
        known[several(grid.shard)] = ranks.shard
    # A group of a single rank sends nothing.
    known[()] = None

    def over(names: tuple[str, ...]) -> dist.ProcessGroup | None:
        names = several(names)
        if names in known:
            return known[names]
        # The ranks that differ from this one in ``names`` alone, in this order.
        strides, stride = {}, 1
        for name in reversed(sizes):
            strides[name], stride = stride, stride * sizes[name]
        first = at = members.index(dist.get_rank())
        for name in names:
            first -= at // strides[name] % sizes[name] * strides[name]
        steps = [range(0, sizes[name] * strides[name], strides[name]) for name in names]
        row = tuple(members[first + sum(each)] for each in product(*steps))
        everyone = range(dist.get_world_size())
        if row == tuple(everyone):
            return dist.group.WORLD
        # Of a pair, this rank knows its own row and column alone.
        if len({*row} & {*everyone}) < len(row):
            raise PlanError(
                f"{name_of(chosen)} expects a tuple of process groups that are the "
                f"rows and columns of a grid, with equal steps between ranks; got one "
                f"that gives ranks {list(row)}. Pass a 2-D device_mesh."
            )
        return group_like(ranks.shard, "placement", row)

    steps = [over(names) for names in dims.steps]
    groups = Groups(over(dims.states), over(dims.others(dims.states)), steps)
    # Not kept: the groups of the nodes may be destroyed before the default group.
    if not by_node:
        ranks.groups[chosen] = groups
    return groups


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
    told = os.environ.get(CHECKPOINT_TIMEOUT) or timeout
    seconds = float(told or group_timeout(dist.group.WORLD))
    return _own_group(ranks, purpose, "gloo", seconds)


def group_like(
    group: dist.ProcessGroup, purpose: str, ranks: tuple[int, ...] = ()
) -> dist.ProcessGroup:
    """Return another group of the ranks (or ``ranks``) and backend of ``group``.

    Collective: creates the group at the first call. NCCL with ``device_id=`` divides
        the default group, all ranks of which must then make a group at the same time.
    """
    ranks = ranks or tuple(dist.get_process_group_ranks(group))
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


def resolve_device(
    device_id: int | torch.device | None,
    ranks: RankLayout,
    parameters: Sequence[torch.Tensor],
    below: Sequence[torch.device] = (),
) -> torch.device:
    """Return the compute device of a unit, with an index if CUDA."""
    if device_id is not None:
        if isinstance(device_id, int):
            return torch.device("cuda", device_id)
        try:
            return _indexed(torch.device(device_id))
        # torch's text lists device types, and does not name the argument.
        except (RuntimeError, TypeError) as error:
            raise PlanError(
                "device_id expects a torch.device, such as torch.device('cuda', 0), or "
                f"the index of a CUDA device; got {device_id!r}."
            ) from error
    known = chain((p.device for p in parameters if not p.is_meta), below)
    kind = "cuda" if ranks.shard_ref.is_nccl else None
    if ranks.device_type is not None:
        kind = ranks.device_type
    if kind is None:
        return next(known, torch.device("cpu"))
    bound = getattr(ranks.shard, "bound_device_id", None)
    near = chain(known, () if bound is None else (bound,))
    same = (device for device in near if device.type == kind)
    return next(same, None) or _indexed(torch.device(kind))


def _indexed(device: torch.device) -> torch.device:
    """Return ``device`` with an index if the device is "cuda"."""
    # "cuda" without an index means the current device, which may change later, and
    # prints without the index.
    if str(device) == "cuda":
        local = os.environ.get("LOCAL_RANK", "")
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
        if not used and local.isdecimal() and int(local) < torch.cuda.device_count():
            # Otherwise all ranks of a node would use the node's first GPU.
            torch.cuda.set_device(int(local))
        return torch.device("cuda", torch.cuda.current_device())
    return device
