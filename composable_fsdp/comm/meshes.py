"""From the groups or the mesh that a caller names to a unit's ranks and device.

Of a mesh with three and more dims, the dims are taken by their names::

    dims                                     ranks of a dim hold           units
    shard, fsdp, dp, data, dp_shard          equal parameters, other data  shard
    cp, context                              equal parameters, parts of    shard
                                             the same sequences
    replicate, dp_replicate, ddp             equal parameters, other data  replicate
    tp, ep, pp, ..                           other parts of the model      refused

Several dims that shard become a single dim of all their ranks, so that a mesh
``(dp_replicate, dp_shard, cp)`` shards over ``dp_shard x cp`` ranks.

Private: ``DeviceMesh._flatten``, ``_get_root_mesh``, checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.placements import REPLICATE_NAMES as REPLICATE
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import quoted

MODEL_PARALLEL = frozenset({"tp", "ep", "pp", "tensor", "expert", "pipeline"})
"""Usual names of mesh dims whose ranks hold different parts of the model."""
SHARD = ("shard", "fsdp", "dp", "data", "dp_shard", "cp", "context")
"""Names of mesh dims over which parameters are sharded."""


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
    kind = mesh = None
    if device_mesh is not None:
        shard, replicate = _groups_of_mesh(device_mesh)
        kind = device_mesh.device_type
        # Numbers, made outside of modes: torch makes this tensor at each read, and a
        # simulation refuses one that is not fake.
        with torch._C._DisableTorchDispatch():
            ranks = device_mesh.mesh
            members = tuple(ranks.reshape(-1).tolist())
        mesh = device_mesh.mesh_dim_names or (), tuple(ranks.shape), members
    elif isinstance(process_group, (tuple, list)):
        shard, replicate = _pair(process_group)
    else:
        group = process_group if process_group is not None else dist.group.WORLD
        shard, replicate = _member(group), None
    if replicate is not None or kind is not None:
        return RankLayout(shard, replicate, kind, mesh=mesh)
    # Only the default group may be divided by node: the caller's own group is used as
    # given. Units of the same group share a layout, and so ``Groups`` objects.
    by_node = process_group is None
    layouts = _layouts.setdefault(shard, {})
    if by_node not in layouts:
        layouts[by_node] = RankLayout(shard, None, None, by_node=by_node)
    return layouts[by_node]


# Layouts by group; the key is whether the caller gave no group. A layout references its
# group weakly (``GroupRef``), so that the entry is deleted together with the group.
_layouts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, RankLayout]] = (
    weakref.WeakKeyDictionary()
)


def _pair(
    groups: Sequence[dist.ProcessGroup],
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the shard group and the replicate group."""
    if len(groups) != 2:
        raise PlanError(
            "A tuple of process groups is (shard group, replicate group); got "
            f"{len(groups)} groups."
        )
    shard, replicate = map(_member, groups)
    first, second = map(dist.get_process_group_ranks, (shard, replicate))
    # The two groups must be a row and a column of a grid of ranks.
    if len(set(first) & set(second)) > 1:
        raise PlanError(
            "A tuple of process groups expects (shard group, replicate group) that "
            f"have one rank in common; got ranks {sorted(first)} and {sorted(second)}. "
            "Make them the rows and columns of a grid, or pass a 2-D device_mesh."
        )
    return shard, replicate


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
    """Return the groups of a 1-D mesh, a 2-D mesh (replicate, shard), or by names.

    Collective: the creation of process groups at the first call, if dims are flattened.
    """
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
    _refuse_others(mesh, [name for name in names if name in SHARD + REPLICATE])
    shard, replicate = _one_dim(mesh, SHARD), _one_dim(mesh, REPLICATE)
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
        f"with mesh_dim_names {', '.join(SHARD)}, which shard, and "
        f"{', '.join(REPLICATE)}, which replicate; got {mesh.ndim}-D, {told}: {mesh}. "
        f"Dims whose ranks hold different parts of the model (tp, ep, pp) must not be "
        f"passed.{rest} If ranks hold equal parameters (context parallelism), flatten: "
        "mesh['dp', 'cp']._flatten('dp_cp')."
    )


def resolve_device(
    device_id: int | torch.device | None,
    ranks: RankLayout,
    parameters: Sequence[torch.Tensor],
    below: Sequence[torch.device] = (),
) -> torch.device:
    """Return the compute device of a unit, with an index if CUDA.

    The first rule that applies: ``device_id``; a device of the mesh's device type; a
    CUDA device if the group uses NCCL; the device of the parameters; the device of the
    units below; the CPU. Among CUDA devices: the device of the parameters or of the
    units below; the device that the group is bound to; the current device.
    """
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
    kind = "cuda" if ranks.is_nccl else None
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
