"""Saving beside training: values are copied at the call and written by a thread.

::

    main thread     collect | agree | copy to host | train ..........
    background                                     | write | agree | commit

The thread has a gloo group of its own, so its exchanges never mix with those of the
main thread. It is no daemon: the interpreter's exit waits for it.
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
from composable_fsdp.storage.consensus import Team, team_of
from composable_fsdp.storage.pending import SaveFuture, remember
from composable_fsdp.storage.save import Job, prepare, write
from composable_fsdp.storage.writer import Piece


def async_save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
) -> Future[None]:
    """Save as ``save`` does, in the background; returns when the values are copied.

    What is written are the values at the call. Until it is written, host memory holds
    one copy of what this rank writes: its shards of parameters and optimizer state.

    The future ends when the checkpoint is committed, or with the error that ``save``
    would raise, the same on every rank. The next ``save``, ``async_save`` or ``load``
    on the same ranks waits for it, and raises its error there if no rank has asked the
    future. Keep the process group until the future has ended.

    Collective: as ``save``, the first exchange in the call and the others in the
    background, on a group of their own that the first call makes.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank, for what
    is found before anything is written.
    """
    team = team_of(module)
    behind = team_of(module, "asynchronous checkpoint")
    job = prepare(team, path, module, optim, extra, keep)
    error: Exception | None = None
    try:
        job.pieces = [_staged(piece) for piece in job.pieces]
    except Exception as raised:
        # Told in the background, where all ranks learn of it alike.
        error = raised
    future = SaveFuture(job.path)
    # Now, so that nobody can cancel it: the other ranks count on this one.
    future.set_running_or_notify_cancel()
    remember(team, future)
    thread = threading.Thread(
        target=_run, args=(behind, job, error, future), name="composable_fsdp save"
    )
    try:
        thread.start()
    except RuntimeError:  # no more threads, and the other ranks have begun
        _run(behind, job, error, future)
    return future


def _staged(piece: Piece) -> Piece:
    """The same with values of its own in host memory."""
    values = [
        part.detach().to("cpu", copy=True) if isinstance(part, Tensor) else part
        for part in piece.pieces()
    ]

    def pieces() -> Iterable[Tensor | int]:
        return values

    return replace(piece, pieces=pieces)


def _run(team: Team, job: Job, error: Exception | None, future: SaveFuture) -> None:
    try:
        write(team, job, error)
    except BaseException as raised:
        future.set_exception(raised)
    else:
        future.set_result(None)
