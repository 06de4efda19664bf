"""What ``COMPOSABLE_FSDP_DEBUG=1`` adds: collectives are compared before they are sent.

The comparison costs an all-gather of 8 bytes per collective, so it is off by default.
"""

from __future__ import annotations

import os
import zlib

import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.comm.operations import OperationRecord
from composable_fsdp.comm.sequence import Operation
from composable_fsdp.errors import DesyncError
from composable_fsdp.naming import listed

DEBUG_VARIABLE = "COMPOSABLE_FSDP_DEBUG"
"""Environment variable: 1 compares every collective across ranks before it is sent, and
refuses shards that change between a forward and its backward."""


def is_debugging() -> bool:
    """Return whether the program runs with ``COMPOSABLE_FSDP_DEBUG=1``."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def require_same_operation(operation: Operation, group: dist.ProcessGroup) -> None:
    """Compare ``operation`` with the operations of all ranks of ``group``.

    Collective: an all-gather of 8 bytes; if the ranks differ, an all-gather of objects.
    Raises: DesyncError, on all ranks alike.
    """
    record = OperationRecord.of(operation)
    # Without the number and the times: what pairs is what is sent at the same time.
    told = " ".join(filter(None, [record.op, record.unit]))
    told += f" ({record.phase}, {record.numel:,} x {record.dtype})"
    # Eight bytes, and not the text: equal texts, of nearly all calls, are never sent.
    tag = zlib.crc32(told.encode())
    if set(collectives.all_gather_tag(tag, group)) == {tag}:
        return
    everyone = zip(
        dist.get_process_group_ranks(group),
        collectives.all_gather_object(told, group),
        strict=True,
    )
    raise DesyncError(
        f"Ranks are about to send different collectives over process group "
        f"{group.group_name!r}, found by {DEBUG_VARIABLE}=1: "
        f"{listed((f'rank {r}: {each}' for r, each in everyone), '; ')}. Nothing "
        "was sent. Make the same calls in the same order on every rank.",
        unit=record.unit,
        op=record.op,
        phase=record.phase,
    )
