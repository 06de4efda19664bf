"""Meshes of three and more dims: the dims that shard and those that replicate, by name.

::

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

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import quoted

MODEL_PARALLEL = frozenset({"tp", "ep", "pp", "tensor", "expert", "pipeline"})
"""Usual names of mesh dims whose ranks hold different parts of the model."""
SHARD = ("shard", "fsdp", "dp", "data", "dp_shard", "cp", "context")
"""Names of mesh dims over which parameters are sharded."""
REPLICATE = ("replicate", "dp_replicate", "ddp")
"""Names of mesh dims over which parameters are replicated."""


def divide_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the 1-D mesh that shards, and the 1-D mesh that replicates, if any.

    Returns: the two meshes. Several dims of a kind are flattened, in the order of the
    mesh.
    Collective: the creation of process groups if dims are flattened, at the first call
    for a mesh; all ranks of the mesh must call.
    Raises: PlanError, for a mesh without names or with other names.
    """
    names = mesh.mesh_dim_names or ()
    shard = [name for name in names if name in SHARD]
    replicate = [name for name in names if name in REPLICATE]
    others = [name for name in names if name not in SHARD + REPLICATE]
    # Unknown names are refused and not guessed: a wrong guess would average
    # gradients of different parameters.
    if not shard or others:
        told = f"dims named {', '.join(map(quoted, names))}" if names else "no names"
        # The dims that may stay, if other dims are cut off.
        kept = ", ".join(map(quoted, (n for n in names if n not in others)))
        rest = f" Of this mesh pass mesh[{kept}]." if shard else ""
        raise PlanError(
            "device_mesh expects a 1-D mesh, a 2-D mesh (replicate, shard), or more "
            f"dims with mesh_dim_names {', '.join(SHARD)}, which "
            f"shard, and {', '.join(REPLICATE)}, which replicate; got "
            f"{mesh.ndim}-D, {told}: {mesh}. Dims whose ranks hold different parts of "
            f"the model (tp, ep, pp) must not be passed.{rest}"
        )
    return _one_dim(mesh, shard), _one_dim(mesh, replicate) if replicate else None


def _one_dim(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the dims ``names`` of ``mesh`` as a single dim."""
    if len(names) == 1:
        return mesh[names[0]]
    # torch keeps the flattened mesh, so that all units get the same process group.
    return mesh[tuple(names)]._flatten()


def refuse_model_parallel(mesh: DeviceMesh, *names: str) -> None:
    """Raise if a dim of the mesh is named for ranks that hold other layers or rows.

    Raises: PlanError, naming the dim and the mesh to pass.
    """
    # Ranks of such a dim compute other values: as shard ranks they would silently
    # average gradients of different parameters.
    parallel = [name for name in names if name in MODEL_PARALLEL]
    if parallel:
        others = [name for name in names if name not in MODEL_PARALLEL]
        rest = f"mesh[{others[0]!r}]" if others else "a mesh of data-parallel ranks"
        raise PlanError(
            "device_mesh expects dimensions that replicate and shard; got a "
            f"dimension named {parallel[0]!r}, whose ranks hold different parts of the "
            f"model: {mesh}. Pass {rest}. If its ranks hold equal parameters (context "
            "parallelism), flatten: mesh['dp', 'cp']._flatten('dp_cp')."
        )
