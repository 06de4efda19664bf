"""Converts a checkpoint of any format into another format, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from os import PathLike, fspath
from pathlib import Path

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.directory import appear
from composable_fsdp.storage.formats.safetensors_files import SafetensorsWriter
from composable_fsdp.storage.formats.write import write_dcp, write_native, write_torch
from composable_fsdp.storage.opening import (
    DCP,
    FORMATS,
    NATIVE,
    SAFETENSORS,
    TORCH,
    open_source,
)
from composable_fsdp.storage.selection import Progress, View
from composable_fsdp.storage.source import Source
from composable_fsdp.storage.storages import require_local

MAX_SHARD_BYTES = 5 * 10**9
"""Default of ``max_shard_bytes``, in bytes: Hugging Face's own limit."""


def convert(
    source: str | PathLike[str] | Source,
    destination: str | PathLike[str],
    to: str,
    *,
    weights_only: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> list[str]:
    """Write the checkpoint ``source`` as another checkpoint of format ``to``.

    Values, dtypes, names and ties stay the same. Memory holds a single tensor, or a
    part of it, at a time, and all for ``torch``. ``destination`` appears when complete;
    no existing file is overwritten. No process group is needed: call ``convert`` in a
    single process.

    Args:
        source: the path of a checkpoint of any format, or an open ``Source``.
        destination: the directory to make; for ``torch`` the file to make, and for
            ``safetensors``, too, if the name ends in ``.safetensors``.
        to: ``native``, ``dcp``, ``safetensors`` or ``torch``.
        weights_only: leave out optimizer, extra state and modules' own states, which
            are then not read. Default False.
        max_shard_bytes: the largest size of a ``safetensors`` file in bytes; larger
            weights are divided into several files. Default ``MAX_SHARD_BYTES`` (5 GB).
        progress: called with the number of bytes read since the last call. Default
            None.

    Returns: a list of words for the parts that were left out: safetensors holds weights
    only, and random states and ``per_rank``, which belong to the ranks of a run, are
    not converted.
    Empty with ``weights_only``.
    Raises: CheckpointError, for a source that is damaged or that the format cannot
    hold, and for a destination that exists or cannot be written; ValueError, for an
    unknown format.

    >>> convert("step_100.pt", "step_100", "dcp")
    []
    """
    if to not in FORMATS:
        raise ValueError(f"convert expects to= one of {FORMATS}, got {to!r}.")
    require_local(fspath(destination), "convert to another format")
    with opened(source) as found:
        # Rank 0 of 1 rank: a source has random states of all ranks or of no rank.
        left_out = [] if found.rng(0, 1) is None else ["random states"]
        left_out += ["scalars of other ranks (local)"] if found.local_states else []
        left_out += ["values of single ranks (per_rank)"] if found.saved_ranks else []
        # safetensors holds weights only, and other parts may be unreadable.
        parts = not (weights_only or to == SAFETENSORS)
        given = View(found, optimizer=parts, values=parts, progress=progress)
        where = Path(destination)
        if to == SAFETENSORS:
            _write_safetensors(where, given, max_shard_bytes)
            left_out += _beside_weights(found)
        else:
            with appear(where) as out:
                _WRITERS[to](out, given)
        return [] if weights_only else left_out


def _write_safetensors(path: Path, source: Source, max_shard_bytes: int) -> None:
    """Write the weights of ``source``; a single file for a file path."""
    with appear(path) as out:
        facts = out, source.model, source.aliases
        single = path.suffix == ".safetensors"
        writer = SafetensorsWriter(
            *facts, max_shard_bytes=max_shard_bytes, single=single
        )
        with closing(writer):
            for name, info in source.model.items():
                for start, stop in info.slices():
                    writer.write(name, start, source.read_model(name, start, stop))
            writer.finish()


_WRITERS: Mapping[str, Callable[[Path, Source], None]] = {
    NATIVE: write_native,
    DCP: write_dcp,
    TORCH: write_torch,
}


@contextmanager
def opened(source: str | PathLike[str] | Source) -> Iterator[Source]:
    """Yield the source itself, or open the path and close the source at the end."""
    # The caller closes a source that the caller has opened.
    given = nullcontext(source) if isinstance(source, Source) else open_whole(source)
    with given as found:
        shown = {*found.model, *found.aliases, *found.own_states}
        if hidden := sorted(found.local_tensors - shown):
            raise CheckpointError(
                f"{getattr(found, 'path', 'the checkpoint')} has values of "
                f"{listed(map(quoted, hidden))} per rank (SaveOptions.local). Open it "
                "by storage.open_source, and pass the source of a rank, "
                "source.on_rank(0)."
            )
        yield found


def open_whole(path: str | PathLike[str]) -> Source:
    """Open a checkpoint that will be read from end to end; see ``open_source``."""
    source = open_source(path)
    try:
        # Those of a ``torch.save`` file cover records, so a slice cannot be verified.
        source.require_checksums()
    except BaseException:
        source.close()
        raise
    return source


def _beside_weights(source: Source) -> Iterator[str]:
    """Yield words for the parts of the source that are not weights."""
    parts: dict[str, Callable[[], object]] = {
        "optimizer state": lambda: source.param_groups,
        "extra state": lambda: source.extra,
        "modules' own states": lambda: source.own_states or None,
    }
    for words, part in parts.items():
        # A part that cannot be read is there.
        is_there: object = True
        with suppress(CheckpointError):
            is_there = part() is not None
        if is_there:
            yield words


def check_readable(
    source: Source, *, weights_only: bool = False, progress: Progress | None = None
) -> int:
    """Read every element of model, optimizer and extra state; return the bytes read."""
    total = 0
    parts = not weights_only
    watched = View(source, optimizer=parts, values=parts, progress=progress)
    tensors = [
        (name, info, partial(watched.read_model, name))
        for name, info in watched.model.items()
    ]
    tensors += [
        (f"{name}, {key}", info, partial(watched.read_optim, name, key))
        for name, states in watched.optim.items()
        for key, info in states.items()
    ]
    for name, info, read in tensors:
        for start, stop in info.slices():
            got = read(start, stop)
            if got.numel() != stop - start or got.dtype != info.dtype:
                raise CheckpointError(
                    f"{name} gave {got.numel()} elements of {got.dtype}; expected "
                    f"{stop - start} of {info.dtype}."
                )
            # A reader may only map the file, so a disk error shows when bytes are read.
            if got.numel():
                got.view(torch.uint8).max()
        total += info.nbytes
    return total
