"""Parameters that are DTensors: the plan lays out this rank's rectangle, and its place.

The only file that uses private parts of DTensor: ``DTensor._local_tensor``,
``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``; and
``torch.utils._python_dispatch._disable_current_modes``. Checked on torch 2.13.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import quoted
from composable_fsdp.planning.layout import Whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(parameter: object) -> bool:
    """Return whether ``parameter`` is a ``torch.distributed.tensor.DTensor``."""
    # Importing DTensor takes long. While the module is not imported, no DTensor can
    # exist.
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's plain tensor of a DTensor; other tensors themselves."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor
    # ``to_local`` makes a node of the graph, and marks the result as a parameter.
    local: Tensor = dtensor._local_tensor
    # A redistribution may have been started and not been waited for.
    wait = getattr(local, "wait", None)
    waited: Tensor = local if wait is None else wait()
    return waited


def whole_of(parameter: Tensor) -> Whole | None:
    """Return where this rank's rectangle lies; None for a plain parameter."""
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: DTensor = parameter  # type: ignore[assignment]  # as is_dtensor says
    mesh = dtensor.device_mesh
    # torch computes with tensors, which have no values under ``torch.device("meta")``.
    with _disable_current_modes(), torch.device("cpu"):
        _, offset = compute_local_shape_and_global_offset(
            dtensor.shape, mesh, dtensor.placements
        )
    # A mesh that was made without names has none to tell.
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return Whole(
        tuple(dtensor.shape),
        tuple(offset),
        tuple(
            (name, mesh.size(dim), _cut_dim(placement))
            for dim, (name, placement) in enumerate(
                zip(names, dtensor.placements, strict=True)
            )
        ),
    )


def _cut_dim(placement: object) -> int | None:
    """Return the dim that ``Shard`` cuts; None for any other placement."""
    from torch.distributed.tensor import Shard

    # The exact class: torch's own FSDP and torch's masks have derived ones.
    return placement.dim if type(placement) is Shard else None


def refuse_cuts(tensor: Tensor, fqn: str, way_out: str) -> None:
    """Raise PlanError for a DTensor of which a rank does not hold a plain rectangle."""
    from torch.distributed.tensor import Replicate

    dtensor: DTensor = tensor  # type: ignore[assignment]  # the caller has looked
    placements = dtensor.placements
    # Two cuts of a dim would make the rows of a rank depend on the order of the cuts.
    cut = [dim for each in placements if (dim := _cut_dim(each)) is not None]
    for each in placements:
        # Also a cut of torch's own FSDP, and sums that are still to be made.
        if _cut_dim(each) is None and type(each) is not Replicate:
            raise PlanError(
                f"Parameter {quoted(fqn)} is a DTensor placed as {each}; expected "
                "Shard or Replicate on each mesh dimension, as parallelize_module "
                f"makes it. Redistribute it first, or {way_out}."
            )
    if len(set(cut)) < len(cut):
        raise PlanError(
            f"Parameter {quoted(fqn)} is a DTensor placed as {tuple(placements)}, "
            "which cuts one dim twice; expected at most one Shard per dim. Use a mesh "
            f"with a single tensor-parallel dimension, or {way_out}."
        )


def refuse_placements(parameter: Tensor, fqn: str) -> None:
    """Raise PlanError for a DTensor that ``fully_shard`` cannot take."""
    refuse_cuts(parameter, fqn, "pass it in ignored_states")
    hooks: Any = parameter
    # Both are None until the first registration.
    if hooks._backward_hooks or hooks._post_accumulate_grad_hooks:
        raise PlanError(
            f"Parameter {quoted(fqn)} is a DTensor with hooks of yours; fully_shard "
            "puts a plain parameter in its place, which would lose them. Register "
            "the hooks after fully_shard."
        )
