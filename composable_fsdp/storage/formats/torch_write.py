"""Writes a ``torch.save`` file without holding the tensors in memory.

``torch.save`` takes a whole dictionary. So the elements are first written to temporary
files and mapped from there: the operating system reads pages while they are saved and
can drop them afterwards.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.storage.formats.nested import nested_tree
from composable_fsdp.storage.formats.safetensors_write import write_elements
from composable_fsdp.storage.source import LazyTensor, Source, TensorInfo


def write_torch(out: Path, source: Source) -> None:
    """Make the file ``out``; needs as much disk space again for temporary files."""
    tree = nested_tree(source)
    # On the file system of ``out``, which must have the space anyway.
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        files: dict[Hashable, Path] = {}
        for later in _lazy_tensors(tree):
            if later.storage not in files:
                files[later.storage] = Path(folder) / str(len(files))
                _spill(later, files[later.storage])
        # Map after all tensors have been written: small objects that are made between
        # large buffers fragment the memory.
        torch.save(_mapped(tree, files, {}), out)


def _lazy_tensors(value: Any) -> Iterator[LazyTensor]:
    """Yield the lazy tensors in nested dicts and lists."""
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _lazy_tensors(each)


def _spill(later: LazyTensor, path: Path) -> None:
    """Write the elements of a tensor to the file ``path``."""
    with path.open("wb") as file:
        for start, stop in later.info.slices():
            write_elements(file, later.read(start, stop))


def _mapped(
    value: Any, files: dict[Hashable, Path], mapped: dict[Hashable, Tensor]
) -> Any:
    """Return ``value`` with mapped tensors; tied names share a tensor."""
    if isinstance(value, LazyTensor):
        # Tied names must share a tensor: ``torch.save`` then writes its storage only
        # once.
        if value.storage not in mapped:
            mapped[value.storage] = _map(value.info, files[value.storage])
        return mapped[value.storage]
    if isinstance(value, Counter):
        return value
    if isinstance(value, dict):
        return {key: _mapped(each, files, mapped) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, files, mapped) for each in value]
    return value


def _map(info: TensorInfo, path: Path) -> Tensor:
    """Return a tensor over the mapped file."""
    # An empty file cannot be mapped.
    if not info.numel:
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    flat = torch.from_file(str(path), shared=False, size=info.nbytes, dtype=torch.uint8)
    return flat.view(info.dtype).view(info.shape)
