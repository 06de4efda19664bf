"""The report of a rank that waits for long: its last operations and its stacks."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from composable_fsdp.comm.groups import operation_logs
from composable_fsdp.comm.operations import OperationRecord

DIRECTORY_VARIABLE = "COMPOSABLE_FSDP_HANG_DIR"
"""Environment variable: an existing directory for reports; else a new private one."""

_LAST = 64
"""Number of operations per group in a report."""
_NCCL_VARIABLES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Where torch writes the flight record of NCCL."""


def write(waits: str) -> str:
    """Write a report; return its path, or why it could not be written."""
    rank = dist.get_rank()
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {waits}"]
    for log in operation_logs():
        lines.append(f"last operations over process group {log.name}:")
        lines += [f"  {OperationRecord.of(o)}" for o in list(log.operations)[-_LAST:]]
    # torch itself writes the record when a collective of NCCL times out, so a report
    # made before can only say where it will be.
    if torch.cuda.is_available():
        found = [os.environ[name] for name in _NCCL_VARIABLES if name in os.environ]
        path = f"{found[0] if found else '/tmp/nccl_trace_rank_'}{rank}"
        lines.append(f"torch writes the flight record of NCCL to {path}")
    # A full disk must not end the thread.
    try:
        folder = os.environ.get(DIRECTORY_VARIABLE)
        folder = folder or tempfile.mkdtemp(prefix="composable_fsdp_hang_")
        # In a directory that others can write to, a file that is there already may be a
        # link of somebody else.
        name = f"rank_{rank}_{time.time_ns()}.txt"
        path = str(Path(folder) / name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o600), "w") as file:
            file.write("\n".join([*lines, "", ""]))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        return f"not written ({error})"
    return path
