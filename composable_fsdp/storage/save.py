"""Writes a checkpoint: each rank writes its own shards, and rank 0 the manifest, last.

No collective carries a tensor: a save sends three small objects over the private gloo
group. ``async_save`` copies the values after the first agreement, and a thread writes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError, warn
from composable_fsdp.naming import listed, takes_optimizer
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.storage.commit import (
    begin,
    commit,
    discard,
    last_time,
    remove_older,
)
from composable_fsdp.storage.compare import Patterns, Selection, hints_at, options_of
from composable_fsdp.storage.contents import contents_of, optimizers_in
from composable_fsdp.storage.directory import named_errors, path_text, sync
from composable_fsdp.storage.manifest import block_size
from composable_fsdp.storage.merge import FilePart, RankPart, merge
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.part import PartMaker
from composable_fsdp.storage.same_on_ranks import (
    digests_of,
    no_facts,
    require_same_values,
    unlike_groups,
)
from composable_fsdp.storage.storages import is_url, join, split, whole_path
from composable_fsdp.storage.team import (
    FirstError,
    SaveFuture,
    Team,
    pending,
    raise_unseen,
    team_of,
    wait_for_pending,
)
from composable_fsdp.storage.writer import (
    Piece,
    host_buffer,
    is_plain,
    paused_collection,
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
    tensors in no unit, such as a rank's experts, with optimizer state and options.
    Each rank's own are saved and come back to the same rank. None: a difference is
    refused."""

    def require_types(self) -> None:
        """Raise TypeError for a value of another type."""
        keep = self.keep
        if keep is not None and (type(keep) is not int or keep < 1):
            raise TypeError(f"save expects keep=None or a number from 1, got {keep!r}.")
        if self.per_rank is not None and not isinstance(self.per_rank, dict):
            raise TypeError(
                "save expects per_rank=None or a dict of this rank's values by name, "
                f"got a {type(self.per_rank).__name__}."
            )


@takes_optimizer
@hints_at(SaveOptions)
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

    >>> save("runs/step-200", model, optimizer, {"epoch": 2})
    """
    team = team_of(module, "save")
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
    block: int
    own: FirstError
    """An error of this rank that the other ranks do not know yet."""
    is_committed: bool = False


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

    Collective: an all-gather of objects; another if values that are saved once differ.
    """
    target, ending, own = "", "", FirstError()
    given = SaveOptions()
    part, pieces, facts = FilePart(), list[Piece](), no_facts()
    # Two saves of the same ranks must not write or exchange objects at the same time.
    before = wait_for_pending(team)
    with own:
        require_module(module, "save")
        target = whole_path(path_text(path, "save"))
        given = options_of(options, SaveOptions, "save")
        given.require_types()
        maker = PartMaker(
            contents_of(module, "save", inner=True),
            Selection.of(given.include, given.exclude, given.trainable_only),
            given.local,
            optimizers_in(optim, "save"),
            team,
        )
        maker.make(extra, given.per_rank)
        part, pieces, facts = maker.part, maker.pieces, maker.facts
        if team.rank == 0:
            ending = begin(target, given.overwrite, team.world_size)
    try:
        nbytes = sum(piece.nbytes for piece in pieces)
        mine = target, ending, before, digests_of(facts), nbytes
        answers = team.agree(own.error, mine)
        raise_unseen(team, [each[2] for each in answers])
        # Names and hashes are sent only of what differs by the digests: of 10,000
        # tensors and 1,024 ranks they are hundreds of megabytes.
        groups = unlike_groups([each[3] for each in answers])
        text = require_same_values(team, facts, groups) if groups else ""
        # A warning per rank would say no more. Where warnings are errors, it is that of
        # all ranks, as any other.
        with own:
            if text and team.rank == 0:
                warn(text)
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
    # Large elements first: the copies of ``snapshot`` are aligned for every dtype.
    pieces.sort(key=lambda piece: -piece.dtype.itemsize)
    return Job(first, ending, part, pieces, given, block, own)


def write(team: Team, job: Job) -> None:
    """Write this rank's file and commit the checkpoint; see ``save``.

    Collective: one gather to rank 0 and one broadcast of objects over the team's group.
    """
    told: Any = None
    own = job.own
    try:
        if own.error is None:
            with own:
                # Network file systems remember for seconds that a name was not there.
                if not is_url(job.path):
                    with named_errors(job.path), suppress(FileExistsError):
                        os.mkdir(job.path)
                name = join(job.path, f"rank{team.rank:05d}{job.ending}")
                told = job.part, *write_file(name, job.pieces, job.block)
        # In an asynchronous save they hold the copies in host memory.
        job.pieces.clear()
        answers = team.outcomes(own.error, told, first=True)
        failures = [each.failure for each in answers]
        if team.rank == 0:
            if not any(failures):
                with own:
                    _finish(job, [each.value for each in answers])
                # A failure of the commit reaches the other ranks as rank 0's error.
                failures[0] = team.failure_of(own.error)
            # Before the other ranks know: they may look at the path, or save again.
            if not job.is_committed:
                discard(job.path, job.ending)
        team.from_first(failures, own.error)
    finally:
        # Also after a lost rank or an interrupt, no file stays behind.
        if team.rank == 0 and not job.is_committed:
            discard(job.path, job.ending)


def _finish(job: Job, told: list[RankPart]) -> None:
    """Merge, check and commit on rank 0."""
    is_local = not is_url(job.path)
    with paused_collection():
        manifest = merge(told, job.block)
        # Clocks differ, and a job may have moved to another machine.
        last = 0
        with suppress(OSError):
            last = last_time(split(job.path)[0]) if is_local else 0
        data = manifest_bytes(manifest, job.path, last)
    sizes = {f.name: f.nbytes for f in manifest.files}
    commit(job.path, data, job.options.overwrite, sizes)
    job.is_committed = True
    try:
        # The name in the parent, too: the sync of a file has brought both to the disk.
        for each in (job.path, split(job.path)[0]) if is_local else ():
            sync(each)
        # Older checkpoints go last: at every moment at least one is complete.
        if problems := remove_older(job.path, job.options.keep, set(sizes)):
            # The checkpoint itself is good, so training must go on.
            warn(
                f"{job.path} was committed; older checkpoints could not be removed: "
                f"{listed(problems)}. The next save tries again.",
            )
    except Exception as error:
        # Raised on all ranks alike, as any error of a save; also a warning, if they are
        # errors in this process.
        raise CheckpointError(
            f"The checkpoint {job.path} was committed and is whole: the save itself "
            "has succeeded, and training can go on. What comes after failed "
            f"({error}): older ones may be there until the next save, and a power cut "
            "may undo the commit."
        ) from error


class SaveMemory:
    """The buffer of a module's asynchronous saves; used by a single save at a time."""

    __slots__ = ("__weakref__", "buffer", "is_used")

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.is_used = True
        """Whether a thread still writes the values in the buffer."""


_memories: weakref.WeakKeyDictionary[nn.Module, SaveMemory] = (
    weakref.WeakKeyDictionary()
)


def free_save_memory(module: nn.Module) -> int:
    """Free the host memory that ``async_save`` keeps for the next save of ``module``.

    If a save is still writing, the memory is freed when the save ends. Returns: the
    number of bytes on this rank; 0 if the module has no such memory.

    >>> async_save("runs/step-400", model, optimizer).result()
    >>> free_save_memory(model) > 0, free_save_memory(model)
    (True, 0)
    """
    # The thread of a save that is not done holds the memory, and nothing else does.
    memory = _memories.pop(module, None)
    return 0 if memory is None or memory.buffer is None else memory.buffer.numel()


# Buffers that are made in inference mode could not be written outside of the mode.
@torch.inference_mode(False)
@torch.no_grad()
def snapshot(memory: SaveMemory, pieces: Sequence[Piece]) -> list[Piece]:
    """Copy the values of ``pieces`` into ``memory``; return pieces of the copies."""
    tensors = [part for piece in pieces for part in piece.pieces()]
    devices = {part.device for part in tensors if part.device.type == "cuda"}
    nbytes = sum(part.nbytes for part in tensors)
    if memory.buffer is None or memory.buffer.numel() < nbytes:
        # Freed first.
        memory.buffer = None
        memory.buffer = host_buffer(nbytes, pinned=bool(devices))
    buffer, begin = memory.buffer, 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        # Without an operator: dispatch takes longer than a small copy, and threads that
        # share a large one wait for each other on busy processors.
        if is_plain(tensor):
            to = buffer.data_ptr() + begin
            ctypes.memmove(to, tensor.data_ptr(), end - begin)
        else:
            into = buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            into.copy_(tensor, non_blocking=True)
        begin = end
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    copies, end = [], 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        copies.append(replace(piece, pieces=partial(list, [buffer[begin:end]])))
    return copies


@takes_optimizer
@hints_at(SaveOptions)
def async_save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None = None,
    extra: Any = None,
    *,
    options: SaveOptions | None = None,
) -> Future[None]:
    """Save as ``save`` does, but in the background; return after the values are copied.

    The checkpoint holds the values at the time of the call. Host memory (pinned, if the
    values are on a CUDA device) holds a single copy of what this rank writes,
    ``ShardingPlan.save_bytes``, and is kept for the next call (``free_save_memory``).

    The future ends when the checkpoint is committed, or with the error that ``save``
    would raise, the same on every rank. The next ``save``, ``async_save`` or ``load``
    on the same ranks waits for it, and raises its error if no rank has asked for it.
    Keep the process group alive until the future has ended.

    Args: those of ``save``.

    Returns: a future with the result None. The future cannot be cancelled.
    Collective: as ``save``. The first exchange happens in the call, the others in the
    background over a second private gloo group, which the first call makes.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank, for errors
    that are found before any file is written.
    """
    team = team_of(module, "async_save")
    behind = team.beside("asynchronous checkpoint")
    job = prepare(team, path, module, optim, extra, options)
    interrupt: BaseException | None = None
    memory = _memories.get(module)
    # A save of the same module by other ranks may still write the values of its call.
    if memory is None or memory.is_used:
        memory = _memories[module] = SaveMemory()
    memory.is_used = True
    try:
        # Not raised here, where only this rank would stop: the thread tells all ranks.
        with job.own:
            job.pieces = snapshot(memory, job.pieces)
    except BaseException as raised:
        # Ctrl-C: the other ranks have begun, and their next save would wait.
        interrupt = raised
        job.own.error = CheckpointError(f"async_save was interrupted ({raised!r}).")
    future = SaveFuture(job.path)
    # As running, so that no caller can cancel it: the other ranks wait for this rank.
    future.set_running_or_notify_cancel()
    pending[team.ranks] = future

    def write_behind() -> None:
        failure: BaseException | None = None
        try:
            write(behind, job)
        except BaseException as raised:
            failure = raised
        # Before the future ends, for which the next save waits, which reuses it.
        memory.is_used = False
        if failure is not None:
            # Before the log, whose handlers may raise: the next save waits for it.
            future.set_exception(failure)
            # The next call raises it, and there may be none.
            _log.error("The asynchronous save of %s failed: %s", job.path, failure)
        else:
            future.set_result(None)

    # Not a daemon thread: the interpreter waits at exit until all is written.
    thread = threading.Thread(target=write_behind, name="composable_fsdp save")
    try:
        thread.start()
    except RuntimeError:  # No thread is available; the other ranks have begun.
        write_behind()
    if interrupt is not None:
        raise interrupt
    return future
