"""Finds the checkpoint that a path stands for, once for all ranks of a load."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.commit import Folder
from composable_fsdp.storage.directory import path_text
from composable_fsdp.storage.opening import find_checkpoint
from composable_fsdp.storage.pending import PendingOutcome, raise_unseen
from composable_fsdp.storage.remote import is_url, join, split, whole_path
from composable_fsdp.storage.source import Source
from composable_fsdp.storage.team import Team


class Found(NamedTuple):
    """An open source or a path to open; ``newest``: rank 0 has found the path.

    ``share`` tells on all ranks alike whether ranks share reads.
    """

    what: str | Source
    newest: bool
    share: bool

    def is_gone(self) -> bool:
        """Return whether a save with ``keep`` has removed the path."""
        # A path that the caller has named is never looked up again: its loss is an
        # error.
        if self.newest and isinstance(self.what, str):
            # The other ranks wait for this rank: what has kept it from opening the
            # checkpoint, such as a network, may well keep it from this answer.
            with suppress(OSError):
                return not Folder(self.what).is_committed
        return False


def look_up(
    team: Team,
    path: str | os.PathLike[str] | Source,
    before: PendingOutcome,
    share: bool | None = None,
) -> Found:
    """Return the checkpoint that this rank opens: rank 0 alone looks in a directory.

    Collective: one all-gather of objects over the team's group.
    Raises: CheckpointError or TypeError, the same on every rank.
    """
    error: Exception | None = None
    own, name = "", "."
    try:
        if share is not None and type(share) is not bool:
            raise TypeError(f"load expects share=None, True or False, got {share!r}.")
        if not isinstance(path, Source):
            own = whole_path(path_text(path, "load"))
            # Ranks that looked for themselves would differ beside a job that saves.
            if team.rank == 0:
                name = _relative(find_checkpoint(own)[0], own)
    except Exception as raised:
        error = raised
    # Also ranks with an open source take part: the call may differ between ranks.
    answers = team.agree(error, (before, name, share, is_url(own)))
    raise_unseen(team, [each[0] for each in answers])
    shares = _shares(team, [each[2] for each in answers], [each[3] for each in answers])
    if isinstance(path, Source):
        return Found(path, newest=False, share=shares)
    # A name, and not the path: each rank may have a disk of its own.
    name = answers[0][1]
    newest = name != "."
    if is_url(own):
        return Found(join(own, name) if newest else own, newest, shares)
    return Found(os.path.normpath(os.path.join(own, name)), newest, shares)


def _shares(team: Team, told: list[bool | None], urls: list[bool]) -> bool:
    """Return whether ranks share reads, from the ``share`` and the path of each.

    Raises: CheckpointError, the same on every rank, if ranks have told differently.
    """
    for rank, each in zip(team.ranks, told, strict=True):
        # A rank that reads for itself would not answer those that wait for its part.
        if each != told[0]:
            raise CheckpointError(
                f"load got share={told[0]} on rank {team.ranks[0]}, and share={each} "
                f"on rank {rank}; expected the same on every rank. Nothing was loaded."
            )
    # A request to a store costs more than a message between ranks; a local file does
    # not, because all ranks of a machine find it in the page cache.
    shares = all(urls) if told[0] is None else told[0]
    return shares and team.world_size > 1


def _relative(found: str, own: str) -> str:
    """Return the path of ``found`` seen from ``own``, which is a path or a URL."""
    if not is_url(own):
        return os.path.relpath(found, own)
    return "." if found == own else split(found)[1]
