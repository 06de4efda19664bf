"""Asynchronous saves that have not ended, by the ranks that take part.

A save or load first waits for the previous save on the same ranks, so two saves never
write or exchange objects at the same time. If the previous save failed and no rank has
called ``result`` or ``exception`` of the future, the failure is raised by the next
call, on every rank.
"""

from __future__ import annotations

import atexit
import warnings
from concurrent.futures import Future
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.team import Team


class SaveFuture(Future[None]):
    """The outcome of an asynchronous save; ``is_seen``: a caller has asked."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.is_seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end. Raises: the error of the save, or TimeoutError."""
        self.is_seen = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the error of the save, or None."""
        self.is_seen = True
        return super().exception(timeout)


_pending: dict[tuple[int, ...], SaveFuture] = {}
"""The last asynchronous save, by the global ranks of the team."""


class PendingOutcome(NamedTuple):
    """The outcome of the previous asynchronous save, as this rank knows it.

    ``failure`` is empty if the save succeeded, or if there was no save.
    """

    failure: str = ""
    is_seen: bool = False


def wait_for_pending(team: Team) -> PendingOutcome:
    """Wait until no asynchronous save of these ranks is running; return the outcome."""
    # ``get`` and not ``pop``: the call may raise another error before ``raise_unseen``,
    # and then a later call must still raise this failure.
    future = _pending.get(team.ranks)
    if future is None:
        return PendingOutcome()
    seen = future.is_seen
    error = Future.exception(future)  # waits; ``is_seen`` does not change
    if error is None:
        return PendingOutcome()
    text = str(error.args[0]) if error.args else str(error)
    return PendingOutcome(
        # Some errors come after the commit, and say so.
        f"The asynchronous save of {future.path} ended with an error. {text}",
        seen,
    )


def remember(team: Team, future: SaveFuture) -> None:
    """Make the next call on these ranks wait for ``future``."""
    _pending[team.ranks] = future


def _tell_unseen() -> None:
    """Warn at the interpreter's exit about failures that no caller has seen."""
    for future in _pending.values():
        error = Future.exception(future) if future.done() else None
        if error is not None and not future.is_seen:
            warnings.warn(
                f"The asynchronous save of {future.path} failed, and nobody has asked "
                f"its future. {error}",
                stacklevel=1,
            )


# At exit, no later call can raise the failure.
atexit.register(_tell_unseen)


def raise_unseen(team: Team, answers: list[PendingOutcome]) -> None:
    """Raise the failure of the previous save, if no rank has seen the failure.

    ``answers`` holds the outcome that each rank knows. The save is forgotten
    afterwards.

    Raises: CheckpointError, the same on every rank.
    """
    # The failure is raised at most once, or has been seen by a caller.
    _pending.pop(team.ranks, None)
    # All ranks have the same ``answers``, so all ranks decide alike.
    failures = [each.failure for each in answers if each.failure]
    if failures and not any(each.is_seen for each in answers):
        raise CheckpointError(f"{failures[0]} This call did nothing; repeat it.")
