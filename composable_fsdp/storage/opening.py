"""Finds, opens, lists and verifies checkpoints; the files at a path tell the format."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal, NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.storage.blocks import ReadRequest
from composable_fsdp.storage.commit import (
    Folder,
    folders_in,
    is_part,
    newest_in,
    number_of,
    remove,
)
from composable_fsdp.storage.directory import (
    MANIFEST,
    TEMPORARY,
    no_checkpoint_text,
    within_limits,
)
from composable_fsdp.storage.formats.dcp_read import METADATA, open_dcp
from composable_fsdp.storage.formats.files import (
    INDEX,
    SINGLE,
    SafetensorsSource,
    open_torch,
)
from composable_fsdp.storage.manifest import BLOCK
from composable_fsdp.storage.native import NativeSource, read_manifest
from composable_fsdp.storage.source import Source
from composable_fsdp.storage.storages import is_url, split, whole_path


class _Format(NamedTuple):
    """A format: words, files in a directory, the start of a file, and what opens it."""

    words: str
    files: tuple[str, ...]
    start: bytes
    opener: Callable[[str], Source]


Format = Literal["native", "dcp", "safetensors", "torch"]
NATIVE: Final = "native"
DCP: Final = "dcp"
SAFETENSORS: Final = "safetensors"
TORCH: Final = "torch"
_FORMATS: dict[str, _Format] = {
    NATIVE: _Format(
        f"a checkpoint of this library ({MANIFEST})", (MANIFEST,), b"", NativeSource
    ),
    DCP: _Format(
        f"one of torch.distributed.checkpoint ({METADATA})",
        (METADATA,),
        b"",
        lambda path: open_dcp(Path(path)),
    ),
    SAFETENSORS: _Format(
        f"safetensors (a file, or {SINGLE} or {INDEX})",
        (SINGLE, INDEX),
        # A length and the start of a JSON object.
        rb".{8}\{",
        lambda path: SafetensorsSource(Path(path)),
    ),
    TORCH: _Format(
        "a torch.save file",
        (),
        # A zip archive, as from torch 1.6 on.
        rb"PK\x03\x04",
        lambda path: open_torch(Path(path)),
    ),
}
FORMATS = tuple(_FORMATS)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open the checkpoint at ``path``, of any format; run no code of a pickle.

    For a directory of checkpoints of this library, open the newest.

    Raises: CheckpointError, if no known format lies at ``path``, or the checkpoint is
    damaged or refused.

    >>> with open_source("runs") as source:
    ...     print(source.model["head.weight"].shape)
    (4, 4)
    """
    path, name = find_checkpoint(path)
    with within_limits(path):
        return _FORMATS[name].opener(path)


def find_checkpoint(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path of the checkpoint that ``path`` stands for, and the format."""
    path = whole_path(path)
    if not is_url(path):
        start = b""
        if os.path.isfile(path):
            try:
                with open(path, "rb") as file:
                    start = file.read(9)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be read: {error.strerror}."
                ) from error
        for each, known in _FORMATS.items():
            # ``lexists``: the reader of the format reports a broken link.
            inside = (os.path.join(path, file) for file in known.files)
            if any(map(os.path.lexists, inside)) or (
                known.start and re.match(known.start, start, re.DOTALL)
            ):
                return path, each
    elif Folder(path).is_committed:
        return path, NATIVE
    if newest := newest_in(path):
        return newest.path, NATIVE
    if is_url(path):
        names = listed(split(each.path)[1] for each in folders_in(path))
        told = f"{path} holds {names or 'nothing'}, and no checkpoint."
    else:
        told = no_checkpoint_text(path)
    *words, last = (each.words for each in _FORMATS.values())
    raise CheckpointError(
        f"{told} Expected {', '.join(words)} or {last}, or a directory that holds "
        "checkpoints of this library; at a URL, checkpoints of this library alone."
    )


def remove_stale(
    directory: str | os.PathLike[str], *, dry_run: bool = False
) -> list[str]:
    """Remove the leftovers of interrupted saves in ``directory``; return their paths.

    Leftovers are folders with files of checkpoints and without a manifest, and
    temporary directories of conversions and exports. A running save looks like one:
    call this only when no save runs. With ``dry_run`` (default False), nothing is
    removed. Returns: paths or URLs, sorted.
    """
    place = whole_path(directory)
    folders = [
        each
        for each in folders_in(place)
        if not each.is_committed and any(map(is_part, each.files))
    ]
    outputs = [
        entry.path
        for entry in (() if is_url(place) else os.scandir(place))
        if TEMPORARY.match(entry.name) and entry.is_dir(follow_symlinks=False)
    ]
    if not dry_run:
        for folder in folders:
            if problems := remove(folder):
                raise OSError(f"{problems[0]} could not be removed.")
        for each in outputs:
            shutil.rmtree(each)
    return sorted([*(each.path for each in folders), *outputs])


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint in a directory, without its values; see ``checkpoints``.

    >>> newest = checkpoints("runs")[-1]
    >>> newest.step, newest.is_whole
    (100, True)
    """

    path: str
    """The absolute path, or the URL."""
    step: int | None
    """The last number in the name, or None."""
    time: datetime
    """The time at which the manifest was written, in UTC."""
    nbytes: int
    """The bytes of all files that are there, manifest included."""
    is_whole: bool
    """Whether the manifest is sound and each file has the size that it says."""


def checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return the native checkpoints in ``directory``, by step and then by time.

    ``directory`` may be a URL; one that is not there has none. Reads manifests and
    sizes, and no payload; ``verify`` reads each byte. Checkpoints that are being
    written are not listed. Raises: OSError, if ``directory`` cannot be listed.

    >>> [(each.step, each.is_whole) for each in checkpoints("runs")]
    [(100, True)]
    """
    folders = folders_in(whole_path(directory))
    found = []
    for folder in folders:
        if not folder.is_committed:
            continue
        step, sizes = number_of(split(folder.path)[1]), folder.sizes
        nbytes = sum(max(size, 0) for size in sizes.values())
        # By size: to read each byte of a series of checkpoints takes minutes.
        is_whole = False
        with suppress(CheckpointError):
            manifest, _ = read_manifest(folder.path, folder)
            is_whole = all(sizes.get(f.name) == f.nbytes for f in manifest.files)
        info = CheckpointInfo(folder.path, step, folder.time, nbytes, is_whole)
        found.append(info)
    return sorted(found, key=lambda info: (info.step or -1, info.time))


Progress = Callable[[int, int], object]
"""A callback that gets the number of bytes read so far, and of all bytes."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``; true in a condition if the checkpoint is good."""

    path: str
    """The checkpoint, also if ``verify`` was called with the parent directory."""
    problems: tuple[str, ...]
    """Full sentences with the file, the parameter and the box."""
    files: int
    """The number of files that were read."""
    nbytes: int
    """The number of payload bytes that were read."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path}: good ({self.files} files, {self.nbytes} bytes)"
        found = "damaged" if self.files else "not verified"
        return "\n".join([f"{self.path}: {found}", *self.problems])


def verify(
    path: str | os.PathLike[str], *, progress: Progress | None = None
) -> Verification:
    """Verify a native checkpoint completely: manifest, file sizes, every checksum.

    ``path`` (or URL) is the checkpoint, or a directory of checkpoints, of which the
    newest is verified. ``progress`` is called after each block of 4 MiB; the default
    None calls nothing. Damage is reported in the result, and does not raise.

    Returns: a result that is true if the checkpoint is good, with the ``path`` that was
    verified, the ``problems`` as sentences, and the number of ``files`` and ``nbytes``.

    >>> assert verify("runs/step-100")
    """
    path = whole_path(path)
    problems: list[str] = []
    files, done = 0, 0
    try:
        path, kind = find_checkpoint(path)
        # Loose tensors would raise at the first damaged block, and hide the others.
        if kind != NATIVE:
            raise CheckpointError(
                f"{path} is of the format {kind}; verify expects a checkpoint that "
                f"save wrote ({MANIFEST})."
            )
        with NativeSource(path, values=False) as source:
            total = sum(file.payload_nbytes for file in source.manifest.files)
            for reader in source.files:
                files += 1
                size = reader.file.payload_nbytes
                # ``max``: an empty payload still has a header to verify.
                for begin in range(0, max(size, 1), BLOCK):
                    end = min(begin + BLOCK, size)
                    try:
                        reader.check([ReadRequest(begin, end, None, 0, ())])
                    except CheckpointError as error:
                        problems.append(str(error.args[0]))
                        # Missing or short: each block would say the same.
                        if not reader.is_open:
                            break
                    done += end - begin
                    if progress is not None:
                        progress(done, total)
    except CheckpointError as error:
        problems.append(str(error.args[0]))
    except OSError as error:
        if not is_url(path):
            raise
        problems.append(f"{path} cannot be read: {error}.")
    return Verification(path, tuple(problems), files, done)
