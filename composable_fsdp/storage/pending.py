"""Asynchronous saves that are not over, by the ranks that take part in them.

A save or load first waits for the one before it on the same ranks, so no two ever write
or talk at a time. If that one failed and nobody has asked its future, the failure is
raised there, on every rank.
"""

from __future__ import annotations

import atexit
import warnings
from concurrent.futures import Future
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.consensus import Team


class SaveFuture(Future[None]):
    """The end of an asynchronous save; notes whether its outcome was asked for."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.is_seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end. Raises: what the save raised, or TimeoutError."""
        self.is_seen = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; what the save raised, None if nothing."""
        self.is_seen = True
        return super().exception(timeout)


_pending: dict[tuple[int, ...], SaveFuture] = {}


class PendingOutcome(NamedTuple):
    """How the asynchronous save before this call ended, as one rank knows it."""

    failure: str = ""
    is_seen: bool = False


def wait_for_pending(team: Team) -> PendingOutcome:
    """Wait until no save of these ranks is running. Sends nothing.

    It stays remembered until ``raise_unseen``: the ranks may have something else to
    raise first.
    """
    future = _pending.get(team.ranks)
    if future is None:
        return PendingOutcome()
    seen = future.is_seen
    error = Future.exception(future)  # waits, and does not count as asked for
    if error is None:
        return PendingOutcome()
    text = str(error.args[0]) if error.args else str(error)
    return PendingOutcome(
        f"The asynchronous save of {future.path} failed. {text}", seen
    )


def remember(team: Team, future: SaveFuture) -> None:
    """Have the next call on these ranks wait for ``future``."""
    _pending[team.ranks] = future


def _tell_unseen() -> None:
    """At the interpreter's exit: no call comes any more that could raise it."""
    for future in _pending.values():
        error = Future.exception(future) if future.done() else None
        if error is not None and not future.is_seen:
            warnings.warn(
                f"The asynchronous save of {future.path} failed, and nobody has asked "
                f"its future. {error}",
                stacklevel=1,
            )


atexit.register(_tell_unseen)


def raise_unseen(team: Team, answers: list[PendingOutcome]) -> None:
    """Raise the failure that no rank has asked about; all ranks know all answers.

    The save is forgotten then.

    Raises: CheckpointError, the same on every rank.
    """
    _pending.pop(team.ranks, None)
    failures = [each.failure for each in answers if each.failure]
    if failures and not any(each.is_seen for each in answers):
        raise CheckpointError(
            f"{failures[0]} This call did nothing; repeat it to go on without that "
            "checkpoint."
        )
