"""The only file that constructs metadata classes of torch.distributed.checkpoint (DCP).

DCP's planners ask a tensor for the items to write, the chunks to read, and the memory
of a chunk. Names checked on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.planning.boxes import Box
from composable_fsdp.state_dict.dcp_caller import CheckedChunks, saving_ranks


def chunks(boxes: Sequence[Box]) -> list[Any]:
    """Return a ``ChunkStorageMetadata`` per box."""
    # Imported here: only DCP calls these functions, and importing DCP takes longer than
    # importing this package.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in boxes
    ]


def chunks_to_load(boxes: Sequence[Box]) -> list[Any]:
    """Return the chunks to load, with a check that the checkpoint covers every box."""
    # DCP's planner reads the elements of the checkpoint and leaves the other elements
    # unchanged.
    return CheckedChunks(chunks(boxes), partial(_require_whole, boxes))


def _require_whole(boxes: Sequence[Box], fqn: str, saved: Sequence[Any]) -> None:
    """Raise CheckpointError unless the ``saved`` chunks cover the boxes."""
    for box in boxes:
        found = sum(_overlap(box, chunk) for chunk in saved)
        # The chunks of a checkpoint do not overlap, so the sum counts each element
        # once.
        if found != box.numel:
            raise CheckpointError(
                f"{fqn!r} is not whole in the checkpoint: of the box at "
                f"{box.offsets} of size {box.sizes} it has {found} of "
                f"{box.numel} elements. It was saved by too few ranks, or with "
                "parts missing; take one that all ranks saved."
            )


def _overlap(box: Box, chunk: Any) -> int:
    """Return the number of elements that a box and a saved chunk share."""
    ends = [
        min(at + size, start + length) - max(at, start)
        for at, size, start, length in zip(
            box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True
        )
    ]
    return prod(ends) if all(end > 0 for end in ends) else 0


def write_items(
    fqn: str,
    local: Tensor,
    shape: torch.Size,
    boxes: Sequence[Box],
    *,
    world_size: int,
) -> list[Any]:
    """Return a ``WriteItem`` per box of ``local``.

    Raises: CheckpointError, if fewer than ``world_size`` ranks save.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    ranks = saving_ranks()
    # With a single rank DCP does not check that the boxes cover the tensor, and a load
    # would later take the incomplete tensor as complete.
    if ranks < world_size:
        raise CheckpointError(
            f"{fqn!r} is in {world_size} parts, got {ranks} ranks to save it: "
            "the checkpoint would have holes. Save on all ranks that hold parts, or "
            "take the state dict under FULL_STATE_DICT."
        )
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            # Offsets identify a box: view_at gets the same offsets back.
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunks(boxes)
    ]


def view_at(local: Tensor, boxes: Sequence[Box], index: Any) -> Tensor:
    """Return the elements of the box at ``index.offset``, as a view of ``local``.

    Returns: a view of the box's shape.
    Raises: CheckpointError, if this rank holds no such box.
    """
    wanted = () if index.offset is None else tuple(index.offset)
    for box in boxes:
        if box.offsets == wanted:
            return local.reshape(-1)[box.start : box.stop].view(box.sizes)
    raise CheckpointError(
        f"{index.fqn!r} was asked for its box at {wanted}, but this rank holds boxes "
        f"at {[box.offsets for box in boxes]}. Plan and read with the same state "
        "dict."
    )
