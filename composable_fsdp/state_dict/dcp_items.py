"""The one seam to the metadata classes of torch.distributed.checkpoint.

Its planners ask a tensor three things: what to write, what to read, and where a box is.
Names checked on torch 2.13. Imported where they are used: only that package
calls these, and importing it takes longer than importing this one.
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
    """One ``ChunkStorageMetadata`` per box."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in boxes
    ]


def chunks_to_load(boxes: Sequence[Box]) -> list[Any]:
    """Return a ``ChunkStorageMetadata`` per box, with a check for holes in the file.

    The planner reads what a checkpoint has of a chunk and does not ask for the rest.
    """
    return CheckedChunks(chunks(boxes), partial(_require_whole, boxes))


def _require_whole(boxes: Sequence[Box], fqn: str, saved: Sequence[Any]) -> None:
    """Raise CheckpointError unless chunks ``saved`` have all elements of the boxes."""
    for box in boxes:
        found = sum(_overlap(box, chunk) for chunk in saved)
        if found != box.numel:
            raise CheckpointError(
                f"{fqn!r} is not whole in the checkpoint: of the box at "
                f"{box.offsets} of size {box.sizes} it has {found} of "
                f"{box.numel} elements. It was saved by too few ranks, or with "
                "parts missing; take one that all ranks saved."
            )


def _overlap(box: Box, chunk: Any) -> int:
    """How many elements a box and a saved chunk have in common."""
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
    """One ``WriteItem`` per box of ``local``, each with the ``shape`` of the whole.

    Raises: CheckpointError, with fewer ranks than the ``world_size`` that hold parts:
    with one rank alone torch does not look whether the whole is there, and loads what
    is as if it were.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    ranks = saving_ranks()
    if ranks < world_size:
        raise CheckpointError(
            f"{fqn!r} is in {world_size} parts, got {ranks} ranks to save it: "
            "the checkpoint would have holes. Save on all ranks that hold parts, or "
            "take the state dict under FULL_STATE_DICT."
        )
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunks(boxes)
    ]


def view_at(local: Tensor, boxes: Sequence[Box], index: Any) -> Tensor:
    """The elements of the box that begins at ``index.offset``, a view of ``local``."""
    wanted = () if index.offset is None else tuple(index.offset)
    for box in boxes:
        if box.offsets == wanted:
            return local.reshape(-1)[box.start : box.stop].view(box.sizes)
    raise CheckpointError(
        f"{index.fqn!r} was asked for its box at {wanted}, but this rank holds boxes "
        f"at {[box.offsets for box in boxes]}. Plan and read with the same state "
        "dict."
    )
