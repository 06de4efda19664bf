"""From any checkpoint to one of another format, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.formats.dcp_write import write_dcp
from composable_fsdp.storage.formats.files import appear
from composable_fsdp.storage.formats.native_write import write_native
from composable_fsdp.storage.formats.safetensors_write import SafetensorsWriter
from composable_fsdp.storage.formats.torch_read import require_checksums
from composable_fsdp.storage.formats.torch_write import write_torch
from composable_fsdp.storage.formats.tree import pieces, tensors_of
from composable_fsdp.storage.opening import (
    DCP,
    FORMATS,
    NATIVE,
    SAFETENSORS,
    TORCH,
    find_checkpoint,
    open_source,
)
from composable_fsdp.storage.source import Source, TensorInfo

MAX_SHARD_BYTES = 5 * 10**9
"""Above this, weights go to several safetensors files: Hugging Face's own limit."""

Progress = Callable[[int], None]
"""Called with the bytes that were read since the last call."""


def convert(
    source: str | PathLike[str] | Source,
    destination: str | PathLike[str],
    to: str,
    *,
    weights_only: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> list[str]:
    """Write the checkpoint ``source`` as another one of format ``to``.

    Values, dtypes, names and ties stay as they are. Holds one tensor at a time in
    memory. ``destination`` appears when it is complete; nothing is overwritten. Needs
    no process group and sends nothing: call it in one process.

    Args:
        source: the path of a checkpoint of any format, or an open one.
        destination: a directory to be made; a file for ``torch``, and for
            ``safetensors`` if it ends in ``.safetensors``.
        to: ``native``, ``dcp``, ``safetensors`` or ``torch``.
        weights_only: leave optimizer, extra state and modules' own states out, unread.
        max_shard_bytes: above it, ``safetensors`` makes several files.
        progress: called with the bytes read since its last call.

    Returns: what was left out, in words: safetensors holds weights alone, and random
    states, which are those of one run's ranks, are not converted.
    Raises: CheckpointError, for a source that is damaged or cannot be kept in that
    format, and for a destination that exists or cannot be written.

    >>> convert("step_100.pt", "step_100", "dcp")
    []
    """
    if to not in FORMATS:
        raise ValueError(f"convert expects to= one of {FORMATS}, got {to!r}.")
    with _opened(source) as opened:
        left_out = [] if opened.rng(0, 1) is None else ["random states"]
        given = _Watched(
            opened, progress, weights_only=weights_only or to == SAFETENSORS
        )
        where = Path(destination)
        if to == SAFETENSORS:
            write_safetensors(where, given, max_shard_bytes=max_shard_bytes)
            left_out += _beside_weights(opened)
        else:
            with appear(where) as out:
                _WRITERS[to](out, given)
        return [] if weights_only else left_out


def write_safetensors(path: Path, source: Source, *, max_shard_bytes: int) -> None:
    """Write the weights of ``source``; one file if ``path`` ends in ``.safetensors``.

    Raises: CheckpointError, as ``convert``.
    """
    with appear(path) as out:
        writer = SafetensorsWriter(
            out,
            source.model,
            source.aliases,
            max_shard_bytes=max_shard_bytes,
            single=path.suffix == ".safetensors",
        )
        with closing(writer):
            for name, info in source.model.items():
                for start, stop in pieces(info):
                    writer.write(name, start, source.read_model(name, start, stop))
            writer.finish()


_WRITERS: Mapping[str, Callable[[Path, Source], None]] = {
    NATIVE: write_native,
    DCP: write_dcp,
    TORCH: write_torch,
}


@contextmanager
def _opened(source: str | PathLike[str] | Source) -> Iterator[Source]:
    """The source itself, or the one at that path, closed at the end."""
    if isinstance(source, Source):
        yield source
    else:
        with open_whole(source) as opened:
            yield opened


def open_whole(path: str | PathLike[str]) -> Source:
    """Open a checkpoint that will be read from end to end; see ``open_source``.

    Raises: CheckpointError, as that; also for a ``torch.save`` file whose checksums,
    which a slice cannot be held against, are not those of its bytes.
    """
    found, kind = find_checkpoint(path)
    if kind == TORCH:
        require_checksums(Path(found))
    return open_source(found)


def _beside_weights(source: Source) -> list[str]:
    """What is in it beside weights, also if it could not be read."""
    return [
        words
        for words, part in (
            ("optimizer state", lambda: source.param_groups),
            ("extra state", lambda: source.extra),
            ("modules' own states", lambda: source.own_states or None),
        )
        if _is_there(part)
    ]


def _is_there(part: Callable[[], object]) -> bool:
    try:
        return part() is not None
    except CheckpointError:
        return True


def check_readable(
    source: Source, *, weights_only: bool = False, progress: Progress | None = None
) -> int:
    """Read every element of model, optimizer and extra state; return the bytes.

    Raises: CheckpointError, for what is damaged or missing.
    """
    total = 0
    watched = _Watched(source, progress, weights_only=weights_only)
    for name, info, read in tensors_of(watched):
        for start, stop in pieces(info):
            got = read(start, stop)
            if got.numel() != stop - start or got.dtype != info.dtype:
                raise CheckpointError(
                    f"{name} gave {got.numel()} elements of {got.dtype}; expected "
                    f"{stop - start} of {info.dtype}."
                )
            _touch(got)
        total += info.nbytes
    return total


def _touch(values: Tensor) -> None:
    """Read every byte: of a mapped file that is when the disk is read."""
    if values.numel():
        values.view(torch.uint8).max()


class _Watched(Source):
    """``source``, telling what is read; as much of it as is wanted."""

    def __init__(
        self, source: Source, progress: Progress | None, *, weights_only: bool
    ) -> None:
        self._source = source
        self._progress = progress
        self.model = source.model
        self.aliases = source.aliases
        self.optim: Mapping[str, Mapping[str, TensorInfo]] = {}
        self.param_groups: Sequence[Mapping[str, Any]] | None = None
        self.extra = None
        if not weights_only:
            self.optim = source.optim
            self.optim_values = source.optim_values
            self.param_groups = source.param_groups
            self.extra = source.extra
            self.own_states = source.own_states

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """See ``Source``."""
        return self._told(self._source.read_model(name, start, stop))

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """See ``Source``."""
        return self._told(self._source.read_optim(name, state, start, stop))

    def _told(self, values: Tensor) -> Tensor:
        if self._progress is not None:
            self._progress(values.numel() * values.dtype.itemsize)
        return values

    def close(self) -> None:
        """Nothing: whoever opened the source closes it."""
