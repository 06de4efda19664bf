"""Saves while training continues: ``async_save`` copies the values, a thread writes.

::

    main thread     collect | agree | copy to host | train ..........
    background                                     | write | agree | commit
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from composable_fsdp.optim.names import Optimizers
from composable_fsdp.storage.pending import SaveFuture, remember
from composable_fsdp.storage.save import Job, SaveValues, prepare, write
from composable_fsdp.storage.selection import Patterns
from composable_fsdp.storage.team import Team, meet_team, team_of
from composable_fsdp.storage.writer import Piece


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
    metric: float | Tensor | None = None,
    best: str = "min",
    keep_best: int = 0,
) -> Future[None]:
    """Save as ``save`` does, but in the background; return after the values are copied.

    The checkpoint holds the values at the time of the call. Until the files are
    written, host memory holds a copy of everything that this rank writes: its shards of
    parameters and optimizer state.

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
        metric: see ``save``.
        best: see ``save``.
        keep_best: see ``save``.

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
    values = SaveValues(
        optim, extra, per_rank, chosen, local, (metric, best), keep_best
    )
    job = prepare(team, path, module, values, keep, overwrite)
    error: Exception | None = None
    try:
        job.pieces = [_staged(piece) for piece in job.pieces]
    except Exception as raised:
        # Do not raise here, where only this rank would stop. The background thread
        # tells the error to all ranks, and all futures end with the same error.
        error = raised
    future = SaveFuture(job.path)
    # Mark the future as running, so that no caller can cancel the save: the other ranks
    # wait for this rank.
    future.set_running_or_notify_cancel()
    remember(team, future)
    # Not a daemon thread: the interpreter waits at exit until the checkpoint is
    # written.
    thread = threading.Thread(
        target=_run, args=(behind, job, error, future), name="composable_fsdp save"
    )
    try:
        thread.start()
    except RuntimeError:  # No thread is available; the other ranks have begun.
        _run(behind, job, error, future)
    return future


def _staged(piece: Piece) -> Piece:
    """Return the piece with the values copied to host memory."""
    # A copy also for CPU tensors: training overwrites the originals while the thread
    # writes.
    values = [
        part.detach().to("cpu", copy=True) if isinstance(part, Tensor) else part
        for part in piece.pieces()
    ]

    def pieces() -> Iterable[Tensor | int]:
        return values

    return replace(piece, pieces=pieces)


def _run(team: Team, job: Job, error: Exception | None, future: SaveFuture) -> None:
    """Write and commit; give the outcome to ``future``."""
    try:
        write(team, job, error)
    except BaseException as raised:
        future.set_exception(raised)
    else:
        future.set_result(None)
