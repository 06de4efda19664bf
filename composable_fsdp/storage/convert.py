"""Converts a checkpoint of any format into another format, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.compare import Progress, View
from composable_fsdp.storage.directory import MANIFEST, appear, path_text, write_synced
from composable_fsdp.storage.formats.dcp_read import METADATA, NOTES
from composable_fsdp.storage.formats.files import SafetensorsWriter
from composable_fsdp.storage.formats.nested import nested_tree, read_all
from composable_fsdp.storage.manifest import Span, require_storable
from composable_fsdp.storage.merge import Draft, TensorPart, merge
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.opening import (
    DCP,
    FORMATS,
    NATIVE,
    SAFETENSORS,
    TORCH,
    Format,
    open_source,
)
from composable_fsdp.storage.source import LazyTensor, Source, TensorInfo
from composable_fsdp.storage.storages import require_local
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import Piece, write_file

DATA = "rank00000.safetensors"


def write_native(out: Path, source: Source) -> None:
    """Make the directory ``out``."""
    out.mkdir()
    try:
        draft = _drafted(source)
    except TypeError as error:
        # ``encode`` speaks of saving; add the way out for a conversion.
        raise CheckpointError(
            f"{error} Convert with --weights-only, or to another format."
        ) from error
    written = write_file(str(out / DATA), draft.pieces)
    # The source's random states are not converted.
    manifest = dataclasses.replace(merge([(draft.part, *written)]), rng=())
    write_synced(str(out / MANIFEST), manifest_bytes(manifest, str(out)))


def _drafted(source: Source) -> Draft:
    """Return the entries of the file and their description."""
    draft = Draft()
    part = draft.part

    def add(key: str, info: TensorInfo, read: Callable[[int, int], Tensor]) -> None:
        require_storable(info.dtype, repr(key))

        def pieces() -> Iterator[Tensor]:
            return (read(start, stop) for start, stop in info.slices())

        draft.pieces.append(Piece(info.dtype, info.shape, key, pieces))

    # First name -> other names of a tied parameter.
    others: dict[str, list[str]] = {}
    for name, kept in source.aliases.items():
        others.setdefault(kept, []).append(name)
    for i, (name, info) in enumerate(source.model.items()):
        # Under the first name, with the other names of a tied parameter.
        names = name, *others.get(name, ())
        tensor = TensorPart(names, info.dtype, info.shape, Span(0, info.numel), i)
        add(tensor.key(), info, partial(source.read_model, name))
        values = dict(source.optim_values.get(name, {}))
        for key, state in source.optim.get(name, {}).items():
            read = partial(source.read_optim, name, key)
            if state.shape == info.shape:
                tensor.states[key] = state.dtype
                add(tensor.key(key), state, read)
            else:
                values[key] = read(0, state.numel).view(state.shape)
        tensor.values = {k: draft.value(k, v, name) for k, v in values.items()}
        part.tensors.append(tensor)
    part.wrappers = dict(source.wrappers)
    for name, value in source.own_states.items():
        part.own_states[name] = encode(value, name, draft.put, python_values=True)
    if source.param_groups is not None:
        part.param_groups = {
            g: encode(dict(group), f"param_groups[{g}]", draft.put, python_values=True)
            for g, group in enumerate(source.param_groups)
        }
    part.extra = encode(source.extra, "extra", draft.put)
    return draft


DCP_DATA = "__0_0.distcp"


def write_dcp(out: Path, source: Source) -> None:
    """Make the directory ``out``. Memory holds a single tensor at a time."""
    # Imported in functions: these modules import half of torch.distributed.
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    # DCP's own writer keeps every tensor in memory until the file is complete.
    out.mkdir()
    tree = nested_tree(source)
    leaves = list(_leaves(tree, ()))
    empty = [path for path, value in leaves if isinstance(value, dict)]
    # Only if needed: the key is visible to users of ``dcp.load``.
    if source.aliases or empty:
        notes = {"aliases": dict(source.aliases), "empty": empty}
        leaves.append(((NOTES,), json.dumps(notes)))
    metadata = Metadata({}, planner_data={}, storage_data={}, version="1.0.0")
    metadata.storage_meta = StorageMeta()
    with (out / DCP_DATA).open("wb") as file:
        for path, value in leaves:
            # For such an entry, DCP's loader would take this for an old version.
            if path not in empty:
                _write(file, metadata, path, value)
    with (out / METADATA).open("wb") as stream:
        pickle.dump(metadata, stream)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of the objects that DCP's planner saves separately."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{'.'.join(map(str, path))} has the key {key!r}, and DCP's are "
                    "text. Convert with --weights-only, or to torch."
                )
            yield from _leaves(each, (*path, key))
    elif isinstance(value, list) and _has_parts(value):
        for i, each in enumerate(value):
            yield from _leaves(each, (*path, i))
    else:
        yield path, value


def _has_parts(values: list[Any]) -> bool:
    """Return whether the planner descends into a list."""
    return any(
        isinstance(each, Mapping | LazyTensor | Tensor)
        or (isinstance(each, list) and _has_parts(each))
        for each in values
    )


def _write(file: BinaryIO, metadata: Any, path: tuple[Any, ...], value: Any) -> None:
    """Append ``value`` to ``file``, and add the place to ``metadata``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    key = ".".join(map(str, path))
    value = value.whole() if isinstance(value, LazyTensor) else value
    begin, offset = file.tell(), None
    torch.save(value, file)
    if isinstance(value, Tensor):
        # The whole tensor is a single chunk at the origin.
        offset = torch.Size([0] * value.ndim)
        chunk = ChunkStorageMetadata(offsets=offset, sizes=value.shape)
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=value.dtype), value.shape, [chunk]
        )
    else:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.planner_data[key] = path
    place = _StorageInfo(DCP_DATA, begin, file.tell() - begin)
    metadata.storage_data[MetadataIndex(key, offset)] = place


MAX_SHARD_BYTES = 5 * 10**9


def convert(
    source: str | PathLike[str] | Source,
    destination: str | PathLike[str],
    to: Format,
    *,
    weights_only: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> list[str]:
    """Write the checkpoint ``source`` as another checkpoint of format ``to``.

    Values, dtypes, names and ties stay the same. Memory holds a single tensor, or a
    part of it, at a time, and all for ``torch``. ``destination`` appears when complete;
    no existing file is overwritten. Call ``convert`` in a single process.

    Args:
        source: the path of a checkpoint of any format, or an open ``Source``.
        destination: the directory to make; for ``torch`` the file to make, and for
            ``safetensors``, too, if the name ends in ``.safetensors``.
        to: ``native``, ``dcp``, ``safetensors`` or ``torch``.
        weights_only: leave out optimizer, extra state and modules' own states, which
            are then not read. Default False.
        max_shard_bytes: the largest size of a ``safetensors`` file in bytes. Default
            ``MAX_SHARD_BYTES`` (5 GB).
        progress: called with the number of bytes read since the last call. Default
            None.

    Returns: words for the parts that were left out: safetensors holds weights only, and
    random states and ``per_rank`` belong to the ranks of a run. Empty with
    ``weights_only``.
    Raises: CheckpointError, for a source that is damaged or that the format cannot
    hold, and for a destination that exists or cannot be written; ValueError, for an
    unknown format.

    >>> convert("step_100.pt", "step_100", "dcp")
    []
    """
    if to not in FORMATS:
        raise ValueError(f"convert expects to= one of {FORMATS}, got {to!r}.")
    require_local(path_text(destination, "convert"), "convert to another format")
    with opened(source) as found:
        # Rank 0 of 1 rank: a source has random states of all ranks or of no rank.
        left_out = [] if found.rng(0, 1) is None else ["random states"]
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
    # ``torch.save`` takes all tensors in host memory.
    TORCH: lambda out, source: torch.save(read_all(nested_tree(source), {}), out),
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
                f"{found.path} has values of {listed(map(quoted, hidden))} per rank "
                "(SaveOptions.local). Open it by storage.open_source, call "
                "source.on_rank(0) for those of a rank, and pass the source."
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
    total, parts = 0, not weights_only
    watched = View(source, optimizer=parts, values=parts, progress=progress)
    reads = [(partial(watched.read_model, n), i) for n, i in watched.model.items()]
    for name, states in watched.optim.items():
        reads += [(partial(watched.read_optim, name, k), i) for k, i in states.items()]
    for read, info in reads:
        for start, stop in info.slices():
            got = read(start, stop)
            # A reader may only map the file, so a disk error shows when bytes are read.
            if got.numel():
                got.view(torch.uint8).max()
        total += info.nbytes
    return total
