"""Saves while training continues: ``async_save`` copies the values, a thread writes.

::

    main thread     collect | agree | copy to host | train ..........
    background                                     | write | agree | commit
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any

from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.storage.pending import SaveFuture, remember
from composable_fsdp.storage.save import Job, SaveValues, prepare, write
from composable_fsdp.storage.selection import Patterns
from composable_fsdp.storage.snapshot import SaveMemory, snapshot, take_memory
from composable_fsdp.storage.team import Team, meet_team, team_of


def async_save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    overwrite: bool = False,
    per_rank: dict[str, Any] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    trainable_only: bool = False,
    local: Patterns = None,
) -> Future[None]:
    """Save as ``save`` does, but in the background; return after the values are copied.

    The checkpoint holds the values at the time of the call. Host memory (pinned, if the
    values are on a CUDA device) holds a single copy of everything that this rank
    writes: its shards of parameters and optimizer state, ``ShardingPlan.save_bytes``.
    The next call reuses the memory, which lives as long as ``module``;
    ``free_save_memory`` frees the memory.

    The future ends when the checkpoint is committed, or with the error that ``save``
    would raise, the same on every rank. The next ``save``, ``async_save`` or ``load``
    on the same ranks waits for the future, and raises the future's error if no rank has
    called ``result`` or ``exception``. Keep the process group alive until the future
    has ended.

    Args:
        path: see ``save``.
        module: see ``save``.
        optim: see ``save``.
        extra: see ``save``.
        keep: see ``save``.
        overwrite: see ``save``.
        per_rank: see ``save``.
        include: see ``save``.
        exclude: see ``save``.
        trainable_only: see ``save``.
        local: see ``save``.

    Returns: a future with the result None. The future cannot be cancelled.
    Collective: as ``save``. The first exchange happens in the call, the others in the
    background over a second private gloo group, which the first call makes.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank, for errors
    that are found before any file is written.
    """
    meet_team(module, "async_save")
    team = team_of(module)
    # The thread has a gloo group of its own, so the two threads' exchanges never mix.
    behind = team_of(module, "asynchronous checkpoint")
    chosen = include, exclude, trainable_only
    values = SaveValues(optim, extra, per_rank, chosen, local)
    job = prepare(team, path, module, values, keep, overwrite)
    error: Exception | None = None
    interrupt: BaseException | None = None
    memory = take_memory(module)
    try:
        job.pieces = snapshot(memory, job.pieces)
    except Exception as raised:
        # Do not raise here, where only this rank would stop. The background thread
        # tells the error to all ranks, and all futures end with the same error.
        error = raised
    except BaseException as raised:
        # Ctrl-C: the other ranks have begun, and would wait for this rank in their
        # threads, and so in the next save.
        interrupt = raised
        error = CheckpointError(f"async_save was interrupted ({raised!r}).")
    future = SaveFuture(job.path)
    # Mark the future as running, so that no caller can cancel the save: the other ranks
    # wait for this rank.
    future.set_running_or_notify_cancel()
    remember(team, future)
    # Not a daemon thread: the interpreter waits at exit until the checkpoint is
    # written.
    thread = threading.Thread(
        target=_run,
        args=(behind, job, error, future, memory),
        name="composable_fsdp save",
    )
    try:
        thread.start()
    except RuntimeError:  # No thread is available; the other ranks have begun.
        _run(behind, job, error, future, memory)
    if interrupt is not None:
        raise interrupt
    return future


def _run(
    team: Team,
    job: Job,
    error: Exception | None,
    future: SaveFuture,
    memory: SaveMemory,
) -> None:
    """Write and commit; free ``memory`` for the next save, then end ``future``."""
    failure: BaseException | None = None
    try:
        write(team, job, error)
    except BaseException as raised:
        failure = raised
    # Before the future ends: the next save, which waits for the future, reuses the
    # memory. Also after an error, when no thread reads the memory any more.
    memory.release()
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(None)
