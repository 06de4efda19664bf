"""Writes a checkpoint: each rank writes its own shards, and rank 0 the manifest, last.

::

    all ranks   collect | agree | write own file, fsync | agree
    rank 0      make the folder   manifest, fsync, rename of this file, older ones away

No collective carries a tensor: a save sends three small objects over the private gloo
group.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.storage.commit import (
    begin,
    commit,
    discard,
    newest_in,
    remove_older,
)
from composable_fsdp.storage.compare import Patterns, Selection, options_of
from composable_fsdp.storage.contents import contents_of, optimizers_in
from composable_fsdp.storage.directory import MANIFEST, make_seen, path_text, sync
from composable_fsdp.storage.manifest import BLOCK, block_size, to_json
from composable_fsdp.storage.merge import FilePart, RankPart, merge
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.part import PartMaker
from composable_fsdp.storage.same_on_ranks import (
    digests_of,
    no_facts,
    require_same_values,
    unlike_groups,
    warn_of,
)
from composable_fsdp.storage.storages import is_url, join, split, whole_path
from composable_fsdp.storage.team import (
    Team,
    meet_team,
    raise_unseen,
    team_of,
    wait_for_pending,
)
from composable_fsdp.storage.validate import parse
from composable_fsdp.storage.writer import (
    Piece,
    in_order,
    paused_collection,
    places_of,
    write_file,
)
from composable_fsdp.tree.traversal import require_module

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What a save replaces, leaves out, and keeps per rank; see ``save``.

    >>> save("runs/step-200", model, optimizer, options=SaveOptions(keep=2))
    """

    keep: int | None = None
    """The number of checkpoints to keep, ``path`` included, among those beside ``path``
    whose names differ in the last number only, such as ``step-100``. Those with the
    smallest numbers are removed after the commit, none with a larger number than
    ``path``. If a removal fails, ``save`` warns, and the next save tries again."""
    overwrite: bool = False
    """Replace a checkpoint at ``path``, which stays until the new one is complete.
    False: an existing path is an error."""
    per_rank: dict[str, Any] | None = None
    """Values of this rank alone, such as the position of a data loader, of the same
    types as ``extra``. ``load`` returns them to the same rank."""
    include: Patterns = None
    """Patterns of the names to save, such as ``"*lora*"`` or the module ``"head"``, or
    a function of a name; the same on every rank. State of the optimizers is saved for
    the parameters that are. None: all names."""
    exclude: Patterns = None
    """Patterns of names to leave out, as ``include``. None: no name."""
    trainable_only: bool = False
    """Leave out buffers, extra states, and parameters that require no gradient."""
    local: Patterns = None
    """Patterns of the names, as ``include``, whose values differ over ranks by design:
    tensors in no unit, such as a rank's experts, with optimizer state and options, and
    scalar optimizer state and options of parameters of units. Each rank's own are saved
    and come back to the same rank. None: a difference is refused."""

    def require_types(self) -> None:
        """Raise TypeError for a value of another type."""
        keep = self.keep
        if keep is not None and (type(keep) is not int or keep < 1):
            raise TypeError(f"save expects keep=None or a number from 1, got {keep!r}.")
        if self.per_rank is not None and not isinstance(self.per_rank, dict):
            raise TypeError(
                "save expects per_rank=None or a dict, got a "
                f"{type(self.per_rank).__name__}. Pass the values of this rank by "
                'name: SaveOptions(per_rank={"loader": loader}).'
            )


def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None = None,
    extra: Any = None,
    *,
    options: SaveOptions | None = None,
) -> None:
    """Write model, optimizer, ``extra`` and random states as the directory ``path``.

    When ``save`` returns, the checkpoint is complete and on the disk, and ``load`` of
    the parent directory finds it. If ``save`` raises, ``path`` is no checkpoint, or the
    one from before, and training can continue (unless the message says that the
    checkpoint itself was committed).

    Args:
        path: the directory to make, or a URL such as ``s3://bucket/runs/step-100``.
            Rank 0's ``path`` is used; a rank with another path logs a warning.
        module: a module that ``fully_shard`` or the wrapper was applied to, or a plain
            module.
        optim: an optimizer over the parameters of ``module``, or a list of optimizers
            with disjoint parameters. Default None: no optimizer state is saved.
        extra: nested dicts, lists and tuples of strings, bytes, numbers, booleans,
            None, tensors, numpy arrays, and objects with ``state_dict`` and
            ``load_state_dict`` such as a scheduler, whose state is saved. ``load``
            returns the values. Rank 0's ``extra`` is saved. Default None.
        options: see ``SaveOptions``. Default None: ``SaveOptions()``.

    Collective: two small gathers (three, if a rank has other values in no unit) and a
    broadcast of objects on a private gloo group, which the first call makes. The group
    holds the ranks of the module's mesh (all ranks, for a plain module); all of them
    must call. No tensor is sent.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank.
    """
    meet_team(module, "save")
    team = team_of(module)
    write(team, prepare(team, path, module, optim, extra, options))


@dataclass(slots=True)
class Job:
    """A save that all ranks have agreed on: the target, and the pieces of this rank."""

    path: str
    """The checkpoint's final directory, absolute: rank 0's, the same on every rank."""
    ending: str
    """The end of the names of the files, which other attempts do not have."""
    part: FilePart
    pieces: list[Piece]
    options: SaveOptions
    error: Exception | None = None
    """An error of this rank that the other ranks do not know yet."""
    block: int = BLOCK


@paused_collection()
def prepare(
    team: Team,
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None,
    extra: Any,
    options: SaveOptions | None,
) -> Job:
    """Collect this rank's pieces and make the directory; all ranks, or none.

    Collective: one all-gather of objects over the team's group; a second all-gather if
    values that are saved once differ.
    """
    target, ending, error = "", "", None
    given = SaveOptions()
    part, pieces, facts = FilePart(), list[Piece](), no_facts()
    # Two saves of the same ranks must not write or exchange objects at the same time.
    before = wait_for_pending(team)
    try:
        require_module(module, "save")
        target = whole_path(path_text(path, "save"))
        given = options_of(options, SaveOptions, "save")
        given.require_types()
        maker = PartMaker(
            contents_of(module, "save", inner=True),
            Selection.of(given.include, given.exclude, given.trainable_only),
            given.local,
            optimizers_in(optim, "save"),
            ranks=team.ranks,
            rank=team.rank,
        )
        maker.make(extra, given.per_rank)
        part, pieces, facts = maker.part, maker.pieces, maker.facts
        if team.rank == 0:
            ending = begin(target, given.overwrite, team.world_size)
    # Do not raise yet: the other ranks would wait in the exchange below for this rank.
    except Exception as raised:
        error = raised
    try:
        nbytes = sum(piece.nbytes for piece in pieces)
        mine = target, ending, before, digests_of(facts), nbytes
        answers = team.agree(error, mine)
        raise_unseen(team, [each[2] for each in answers])
        # Names and hashes are sent only of what differs by the digests: of 10,000
        # tensors and 1,024 ranks they are hundreds of megabytes.
        groups = unlike_groups([each[3] for each in answers])
        if groups and (text := require_same_values(team, facts, groups)):
            # A warning per rank would say no more.
            error = warn_of(text) if team.rank == 0 else None
    except BaseException:
        if ending:
            discard(target, ending)
        raise
    # Only rank 0 has made a directory; the other ranks write into the same directory.
    first, ending, *_ = answers[0]
    # A path with the time in its name may differ, and the save is right.
    if target != first:
        text = "save got the path %r on rank %d and writes to rank 0's %r."
        _log.warning(text, target, team.rank, first)
    block = block_size(sum(each[4] for each in answers))
    return Job(first, ending, part, in_order(pieces), given, error, block)


def write(team: Team, job: Job, error: Exception | None = None) -> None:
    """Write this rank's file and commit the checkpoint; see ``save``.

    Collective: one gather to rank 0 and one broadcast of objects over the team's group.
    """
    told: Any = None
    committed = False
    error = error or job.error
    try:
        try:
            if error is not None:
                raise error
            if not is_url(job.path):
                make_seen(job.path)
            name = f"rank{team.rank:05d}{job.ending}"
            file = write_file(join(job.path, name), job.pieces, job.block)
            told = job.part, file, places_of(job.pieces)
        except Exception as raised:
            error = raised
        # In an asynchronous save they hold the copies in host memory.
        job.pieces.clear()
        answers = team.outcomes(error, told, first=True)
        failures = [each.failure for each in answers]
        if team.rank == 0:
            failure = None
            if not any(failures):
                committed, failure = _finish(job, [each.value for each in answers])
                # A failure of the commit reaches the other ranks as rank 0's error.
                failures[0] = team.failure_of(failure)
            error = error or failure
            # Before the other ranks know: they may look at the path, or save again.
            if not committed:
                discard(job.path, job.ending)
        team.from_first(failures, error)
    finally:
        # Also after a lost rank or an interrupt, no file stays behind.
        if team.rank == 0 and not committed:
            discard(job.path, job.ending)


def _finish(job: Job, told: list[RankPart]) -> tuple[bool, Exception | None]:
    """Merge, check and commit on rank 0; return whether committed, and any error."""
    committed, is_local = False, not is_url(job.path)
    try:
        with paused_collection():
            manifest = merge(told, job.block)
            # Raises if no load takes it.
            parse(to_json(manifest), join(job.path, MANIFEST))
            # Clocks differ, and a job may have moved to another machine.
            newest = None
            with suppress(OSError):
                newest = newest_in(split(job.path)[0]) if is_local else None
            data = manifest_bytes(manifest, newest.age[0] if newest else 0)
        sizes = {f.name: f.header_nbytes + f.payload_nbytes for f in manifest.files}
        commit(job.path, data, job.options.overwrite, sizes)
        committed = True
        if is_local:
            sync(job.path)
        # Older checkpoints go last: at every moment at least one is complete.
        if problems := remove_older(job.path, job.options.keep, set(sizes)):
            # The checkpoint itself is good, so training must go on.
            warnings.warn(
                f"{job.path} was committed; older checkpoints could not be removed: "
                f"{listed(problems)}. The next save tries again.",
                stacklevel=2,
            )
    except Exception as raised:
        # The checkpoint is valid although a later step failed; the message must say so.
        return committed, _after_commit(job, raised) if committed else raised
    return True, None


def _after_commit(job: Job, error: Exception) -> Exception:
    """Return the error for a failure after the commit."""
    # Raised on all ranks alike, as any error of a save.
    if isinstance(error, Warning):
        return CheckpointError(
            f"{error} This is a warning, which is raised because warnings are errors "
            "in this process: the save itself has succeeded, and training can go on."
        )
    return CheckpointError(
        f"The checkpoint {job.path} was committed and is whole, but what comes after "
        f"failed ({error}): older ones may still be there, and a power cut may undo "
        "the commit. load of the directory reads the new one, and the next save "
        "removes the rest."
    )
