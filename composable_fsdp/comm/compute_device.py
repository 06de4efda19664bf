"""The compute device of a unit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain

import torch

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.errors import PlanError


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
