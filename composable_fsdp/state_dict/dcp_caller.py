"""What a running function of ``torch.distributed.checkpoint`` (DCP) was given.

DCP gathers only torch's own sharded tensors, and takes other results of
``module.state_dict()`` and ``optim.state_dict()`` as they are. So hooks look up the
arguments of the function of DCP that calls them, in its frame::

    get_model_state_dict(model, options)          torch
      -> _get_model_state_dict(model, info)
        -> module.state_dict() -> hook            dcp_request() reads model and info

Names checked on torch 2.13 and 2.11: the functions and their variables, and
``full_state_dict`` and ``cpu_offload`` of ``info``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.planning.partition import Box

_PACKAGE = "torch.distributed.checkpoint"
MODULE = f"{_PACKAGE}.state_dict"
"""The module of DCP that calls state dicts."""


class DcpRequest(NamedTuple):
    """The options of a running DCP call, and the model that DCP was given."""

    model: nn.Module
    full: bool
    """Full tensors instead of sharded values."""
    to_cpu: bool
    """Copy the tensors to host memory."""


def _running(*functions: str) -> Mapping[str, Any] | None:
    """Return the variables of the innermost of these functions of DCP that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in functions and module.startswith(_PACKAGE):
            return frame.f_locals
        frame = frame.f_back
    return None


def dcp_request() -> DcpRequest | None:
    """Return the options of the running DCP call; None if no call is running."""
    if MODULE not in sys.modules:
        return None
    given = _running(
        "_get_model_state_dict",
        "_get_optim_state_dict",
        "_load_model_state_dict",
        "_load_optim_state_dict",
    )
    if given is None:
        return None
    info = given["info"]
    return DcpRequest(given["model"], info.full_state_dict, info.cpu_offload)


def chunks(boxes: Sequence[Box]) -> list[Any]:
    """Return a ``ChunkStorageMetadata`` per box."""
    # Here, because importing DCP takes longer than importing this package.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in boxes
    ]


def chunks_to_load(boxes: Sequence[Box]) -> list[Any]:
    """Return DCP's chunks for ``boxes``, of which a checkpoint must hold the whole."""
    reading = _running("_create_read_items") or {}
    # DCP reads what the checkpoint has, and leaves the other elements as they were.
    for box in boxes if reading else ():
        # The chunks of a checkpoint do not overlap: each element counts once.
        found = sum(_overlap(box, chunk) for chunk in reading["md"].chunks)
        if found != box.numel:
            raise CheckpointError(
                f"{reading['fqn']!r} is not whole in the checkpoint: of the box at "
                f"{box.offsets} of size {box.sizes} it has {found} of {box.numel} "
                "elements. It was saved by too few ranks, or with parts missing; take "
                "one that all ranks saved."
            )
    return chunks(boxes)


def _overlap(box: Box, chunk: Any) -> int:
    """Return the number of elements that a box and a saved chunk share."""
    cut = zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
    # Not below 0 each: the product of two negative lengths would count.
    return prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in cut)


def write_items(
    fqn: str, local: Tensor, shape: torch.Size, boxes: Sequence[Box], *, parts: int
) -> list[Any]:
    """Return a ``WriteItem`` per box of ``local``, one of ``parts`` parts."""
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

    saving = _running("_save_state_dict")
    # With ``no_dist`` a single process saves, also inside an initialized process group.
    ranks = 1
    if dist.is_initialized() and not (saving and saving["no_dist"]):
        ranks = dist.get_world_size(saving["process_group"] if saving else None)
    # Of a save on a single rank DCP does not check that the boxes cover the tensor, and
    # a load would leave the other elements as they were.
    if ranks < parts:
        raise CheckpointError(
            f"{fqn!r} is in {parts} parts, got {ranks} ranks to save it: "
            "the checkpoint would have holes. Save on all ranks that hold parts, or "
            "take the state dict under FULL_STATE_DICT."
        )
    properties = TensorProperties.create_from_tensor(local)
    return [
        planner.WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, properties, shape),
        )
        for chunk in chunks(boxes)
    ]
