"""Gives a complete checkpoint directory its name; a crash in between is finished.

A commit has several steps. Before the first, a *record* tells what was meant; the next
save finishes the steps, and a load reads the directory that the record names::

    .step-2.commit-9f3a..      three lines: name, temporary directory, checksum
    .step-2.tmp-9f3a..         complete; becomes step-2
    .step-2.old-77b0..         the checkpoint that is replaced, if any
    latest                     names step-2; after that, the record is removed

No function here uses a collective.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import (
    MANIFEST,
    follow_latest,
    require_free,
    set_latest,
    sync,
    write_synced,
)

_RECORD = re.compile(r"\.(?P<name>.+)\.commit-[0-9a-f]{16}\Z")
_NUMBER = re.compile(r"(?P<before>.*?)(?P<number>\d+)(?P<after>\D*)\Z", re.DOTALL)
_LONGEST = 4096
"""The number of bytes that are read of a record, and of a manifest's first line."""


class _Record(NamedTuple):
    """What a commit meant to do; paths are absolute."""

    file: str
    path: str
    made: str
    head: str


def require_place(path: str, overwrite: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be saved at ``path``."""
    if not overwrite or not os.path.lexists(path):
        # Exports and conversions have no such option.
        require_free(path, more=", or pass save(..., overwrite=True)")
    # A link is kept: its target may lie on another file system, or be of another run.
    elif os.path.islink(path) or not head_of(path):
        raise CheckpointError(
            f"{path} is no checkpoint of this library; overwrite=True replaces such "
            "alone. Choose another name, or remove it first."
        )


def head_of(path: str) -> str:
    """Return the first line of the manifest, with the checksum; "" if there is none."""
    # The checksum identifies the checkpoint: the manifest holds those of all files.
    return _first_bytes(os.path.join(path, MANIFEST)).partition("\n")[0]


def _first_bytes(file: str) -> str:
    """Return the first bytes of a regular file as text; "" if there is none."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.read(handle, _LONGEST).decode(errors="replace")
        finally:
            os.close(handle)
    except OSError:
        return ""


def commit(made: str, path: str, overwrite: bool = False) -> None:
    """Rename the complete checkpoint ``made`` to ``path``.

    The files must be on the disk. The name is on the disk after ``finish_commit``. If
    ``commit`` raises, ``path`` is as before.

    Raises: CheckpointError, if ``path`` exists; OSError.
    """
    require_place(path, overwrite)
    sync(made)
    parent, name = os.path.split(path)
    head, token = head_of(made), secrets.token_hex(8)
    record = os.path.join(parent, f".{name}.commit-{token}")
    aside = os.path.join(parent, f".{name}.old-{token}")
    try:
        write_synced(record, f"{name}\n{os.path.basename(made)}\n{head}\n".encode())
        sync(parent)
        # Two renames, because a rename cannot replace a directory with files. Between
        # them only the record leads to the new checkpoint. The new checkpoint is at
        # ``path`` already, and no longer at ``made``, if a save of another name, which
        # finishes all records of the directory, came in between. The checksums do not
        # tell: a run that was repeated bit by bit has saved the same.
        if overwrite and os.path.lexists(path) and os.path.lexists(made):
            os.rename(path, aside)
        try:
            os.rename(made, path)
        except OSError:
            # NFS may repeat a rename whose answer was lost, and then report that the
            # source is gone; or another save has done the rename.
            if os.path.lexists(made) or head_of(path) != head:
                raise
    # Also for Ctrl-C: the old checkpoint must be back before the process leaves.
    except BaseException:
        # The disk tells: Ctrl-C may have come between a rename and the next line.
        if os.path.lexists(aside) and not os.path.lexists(path):
            os.rename(aside, path)
        # Without the rename the record would speak of a directory that is discarded.
        # After it, the record lets the next call finish the commit.
        if os.path.lexists(made) or head_of(path) != head:
            with suppress(OSError):
                os.unlink(record)
        raise


def finish_commit(path: str) -> None:
    """Make ``latest`` name ``path``; on return, both names are on the disk.

    Raises: OSError; then the next ``finish_commits`` does the rest.
    """
    parent = os.path.dirname(path)
    # The name of the checkpoint goes to the disk before ``latest`` can refer to it.
    sync(parent)
    set_latest(path)
    for record in _records(parent):
        if record.path == path:
            with suppress(FileNotFoundError):
                os.unlink(record.file)


def finish_commits(directory: str) -> None:
    """Finish commits in ``directory`` that a crash has interrupted.

    Records without their directory, which say nothing any more, are removed.
    """
    for record in _records(directory):
        # A rename is repeated here, and not the writing: the record was made when all
        # files were on the disk.
        place = _place(record)
        if place == record.made:
            # Another process may be at the same step; then the directory is gone.
            with suppress(FileNotFoundError):
                os.rename(record.made, record.path)
        if place:
            finish_commit(record.path)
        elif not record.head or not os.path.lexists(record.made):
            with suppress(FileNotFoundError):
                os.unlink(record.file)


def _records(directory: str) -> list[_Record]:
    """Return the records in ``directory``, oldest first."""
    found = []
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    for entry in names:
        match = _RECORD.match(entry)
        if match is None:
            continue
        file = os.path.join(directory, entry)
        name, made, head, *_ = [*_first_bytes(file).split("\n"), "", "", ""]
        # A record is data: a damaged one, or one that a crash has cut short, must not
        # lead to a directory.
        plain = os.path.basename(made) == made and made.startswith(f".{match['name']}.")
        if name != match["name"] or not plain:
            head = ""
        name = match["name"]
        with suppress(OSError):
            path = os.path.join(directory, name)
            age = os.lstat(file).st_mtime_ns
            found.append(
                (age, _Record(file, path, os.path.join(directory, made), head))
            )
    return [record for _, record in sorted(found)]


def _place(record: _Record) -> str:
    """Return where the checkpoint of ``record`` is now; "" if it is gone."""
    if not record.head:
        return ""
    # A save of the same name may have replaced the checkpoint since; the checksum
    # tells.
    if head_of(record.path) == record.head:
        return record.path
    # With another checkpoint at the path, the commit had not begun.
    if not os.path.lexists(record.path) and head_of(record.made) == record.head:
        return record.made
    return ""


def newest_in(directory: str) -> str:
    """Return the checkpoint that was committed last in ``directory``.

    The checkpoint of an interrupted commit comes before the one that ``latest`` names.

    Raises: CheckpointError, as ``follow_latest``.
    """
    # The last record is of the save that began last: an earlier save of this
    # directory has finished the records before it.
    places = list(filter(None, map(_place, _records(directory))))
    return places[-1] if places else follow_latest(directory)


def interrupted(path: str) -> str:
    """Return the directory of an interrupted commit of ``path``, or "".

    Only a commit between two renames leaves no directory at ``path``.
    """
    if os.path.lexists(path):
        return ""
    parent = os.path.dirname(path)
    places = [_place(record) for record in _records(parent) if record.path == path]
    return next(filter(None, reversed(places)), "")


def has_newest(directory: str) -> bool:
    """Return whether ``newest_in`` can name a checkpoint in ``directory``."""
    if os.path.isfile(os.path.join(directory, "latest")):
        return True
    return any(map(_place, _records(directory)))


def number_of(name: str) -> int | None:
    """Return the last number in ``name``, or None.

    >>> number_of("lr0.1-step-200"), number_of("best")
    (200, None)
    """
    match = _NUMBER.match(name)
    return int(match["number"]) if match else None


def is_of_series(name: str, other: str) -> bool:
    """Return whether two names differ in the last number only, or are equal.

    >>> is_of_series("lr0.1-step-1", "lr0.1-step-20"), is_of_series("a-1", "b-1")
    (True, False)
    """
    own, match = _NUMBER.match(name), _NUMBER.match(other)
    if own is None or match is None:
        return other == name
    return all(match[end] == own[end] for end in ("before", "after"))


def remove_older(path: str, keep: int | None) -> list[str]:
    """Remove replaced checkpoints, and all of the series but the newest ``keep``.

    The series of ``path`` are the checkpoints beside ``path`` whose names differ from
    the name of ``path`` in the last number only, and whose number is smaller:
    ``lr0.1-step-100`` is of the series of ``lr0.1-step-200``, ``lr0.2-step-100`` is
    not. With ``keep`` None, no checkpoint of the series is removed.
    """
    parent, name = os.path.split(path)
    own = _NUMBER.match(name)
    problems: list[str] = []
    older: list[tuple[int, str]] = []

    for entry in list(os.scandir(parent)):
        # Only directories, and never the target of a link.
        if not entry.is_dir(follow_symlinks=False):
            continue
        # Left by a removal that failed or was interrupted.
        old = re.match(r"\.(.+)\.old-[0-9a-f]{16}\Z", entry.name)
        if old and (
            old[1] == name or (keep is not None and is_of_series(name, old[1]))
        ):
            _remove(entry.path, problems)
        elif (
            entry.name != name
            and keep is not None
            and is_of_series(name, entry.name)
            and own is not None
        ):
            number = number_of(entry.name)
            has_manifest = os.path.lexists(os.path.join(entry.path, MANIFEST))
            # Never one with a larger number: the run may have gone back to an older
            # checkpoint.
            if number is not None and number <= int(own["number"]) and has_manifest:
                older.append((number, entry.path))
    count = len(older) if keep is None else keep - 1
    older.sort(reverse=True)
    for _, each in older[count:]:
        base, token = os.path.basename(each), secrets.token_hex(8)
        aside = os.path.join(parent, f".{base}.old-{token}")
        # Rename before removing: a directory that is removed only in part must not be
        # taken for a checkpoint.
        try:
            os.rename(each, aside)
        except OSError as error:
            problems.append(f"{each} ({error.strerror})")
            continue
        _remove(aside, problems)
    return problems


def _remove(path: str, problems: list[str]) -> None:
    """Remove a directory; add a text to ``problems`` if that fails."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        problems.append(f"{path} ({error.strerror})")
