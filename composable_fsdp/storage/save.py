"""Writing a checkpoint: each rank its shards, one rename, one outcome for all.

::

    all ranks   collect | agree | write own file, fsync | agree
    rank 0      make .name.tmp-..     manifest, fsync, rename, latest, older ones away

Until the rename nothing is at ``path``; after it a whole checkpoint is. No tensor is
sent: three small objects per save cross the private group.
"""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.storage import crash
from composable_fsdp.storage.consensus import Team, team_of
from composable_fsdp.storage.contents import (
    contents_of,
    optimizers_in,
)
from composable_fsdp.storage.directory import (
    MANIFEST,
    commit,
    make_temporary,
    path_text,
    remove_older,
    set_latest,
    stale_copies,
    write_synced,
)
from composable_fsdp.storage.manifest import Manifest
from composable_fsdp.storage.merge import merge
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.part import Part, PartMaker, add_missing, digest
from composable_fsdp.storage.pending import raise_unseen, wait_for_pending
from composable_fsdp.storage.validate import parse
from composable_fsdp.storage.writer import Piece, in_order, places_of, write_file
from composable_fsdp.tree.traversal import require_module


def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
) -> None:
    """Write model, optimizer, ``extra`` and random states as the directory ``path``.

    When this returns, the checkpoint is whole and on the disk, and the text file
    ``latest`` beside it names it. When it raises, there is nothing at ``path`` and
    training can go on (unless the message says that the checkpoint itself was
    committed).

    Args:
        path: where the checkpoint will be; nothing may be there. Rank 0's counts.
        module: a sharded model on either path, or a plain one.
        optim: an optimizer over its parameters, or a list of several, each over its
            own.
        extra: nested dicts and lists of strings, numbers, booleans, None and tensors;
            rank 0's is saved, as ``load`` will return it.
        keep: how many checkpoints to keep of those beside ``path`` whose names differ
            from its in digits only; older ones are removed after the commit.

    Collective: two small gathers (three, where a rank has no optimizer state that
    others have) and a broadcast of objects on a private gloo group of the ranks of the
    module's mesh (all ranks, for a plain module), which the first call makes; all of
    them must call. No tensor is sent.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank.
    """
    team = team_of(module)
    write(team, prepare(team, path, module, optim, extra, keep))


@dataclass(slots=True)
class Job:
    """A save that all ranks have agreed on: what this rank writes, and where."""

    path: str
    temporary: str
    part: Part
    pieces: list[Piece]
    keep: int | None


def prepare(
    team: Team,
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None,
    extra: Any,
    keep: int | None,
) -> Job:
    """Collect what this rank writes and make the directory; all ranks or none.

    Collective: one gather of objects on the team's group; a second where ranks have
    other kinds of optimizer state.
    """
    target, temporary, error = "", "", None
    part, pieces = Part(), list[Piece]()
    before = wait_for_pending(team)
    try:
        require_module(module, "save")
        target = os.path.abspath(path_text(path, "save"))
        if keep is not None and (type(keep) is not int or keep < 1):
            raise TypeError(f"save expects keep=None or a number from 1, got {keep!r}.")
        optims = optimizers_in(optim, "save")
        contents = contents_of(module, "save")
        part, pieces = PartMaker(contents, is_first=team.rank == 0).make(optims, extra)
        if team.rank == 0:
            temporary = make_temporary(target)
    except Exception as raised:
        error = raised
    try:
        kinds = part.kinds()
        answers = team.agree(error, (target, temporary, before, digest(kinds)))
        raise_unseen(team, [before for _, _, before, _ in answers])
        if len({each for *_, each in answers if each}) > 1:
            add_missing(part, pieces, team.agree(None, kinds))
    except BaseException:
        _discard(temporary)
        raise
    target, temporary, *_ = answers[0]
    return Job(target, temporary, part, in_order(pieces), keep)


def write(team: Team, job: Job, error: Exception | None = None) -> None:
    """Write this rank's file and commit; see ``save``.

    With an ``error`` this rank writes nothing, and all ranks raise it.

    Collective: one gather and one broadcast of objects on the team's group.
    Raises: CheckpointError, the same on every rank.
    """
    told: Any = None
    try:
        if error is not None:
            raise error
        crash.crash_point("before-write", team.rank)
        begins = places_of(job.pieces)
        name = f"rank{team.rank:05d}.safetensors"
        file = write_file(os.path.join(job.temporary, name), job.pieces, rank=team.rank)
        told = job.part, file, begins
        crash.crash_point("after-write", team.rank)
    except Exception as raised:
        error = raised
    job.pieces.clear()
    committed = False
    try:
        answers = team.to_first(error, told)
        errors = [problem for problem, _ in answers]
        if team.rank == 0:
            failure = None
            if not any(errors):
                committed, failure = _finish(job, [said for _, said in answers])
                errors[0] = team.describe(failure)
            error = error or failure
        team.from_first(errors, error)
    finally:
        if team.rank == 0 and not committed:
            _discard(job.temporary)


def _finish(job: Job, told: list[Any]) -> tuple[bool, Exception | None]:
    """On rank 0: whether the checkpoint was committed, and what went wrong."""
    committed = False
    try:
        manifest = merge(told)
        _require_sound(manifest, job.path)
        write_synced(os.path.join(job.temporary, MANIFEST), manifest_bytes(manifest))
        crash.crash_point("before-rename", 0)
        commit(job.temporary, job.path)
        committed = True
        crash.crash_point("after-rename", 0)
        set_latest(job.path)
        if job.keep is not None:
            remove_older(job.path, job.keep)
        stale = stale_copies(job.path)
        if stale:
            warnings.warn(
                f"{', '.join(stale)} were left by saves of {job.path} that were "
                "interrupted. Remove them, or call "
                f"remove_stale({os.path.dirname(job.path)!r}).",
                stacklevel=2,
            )
    except Exception as raised:
        if committed:
            return True, _after_commit(job, raised)
        return False, raised
    return True, None


def _require_sound(manifest: Manifest, path: str) -> None:
    """What is written must be readable: the same checks as at load, before commit."""
    parse(manifest.to_json(), os.path.join(path, MANIFEST))


def _after_commit(job: Job, error: Exception) -> Exception:
    return CheckpointError(
        f"The checkpoint {job.path} was committed and is whole, but what comes after "
        f"failed ({error}): 'latest' may name an older one, and older ones may still "
        "be there."
    )


def _discard(temporary: str) -> None:
    if temporary:
        shutil.rmtree(temporary, ignore_errors=True)
