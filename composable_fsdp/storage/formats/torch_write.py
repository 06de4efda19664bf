"""A ``torch.save`` file, written without holding its tensors in memory.

``torch.save`` takes a whole dictionary. So elements go to files of their own first, and
are mapped from there: the system reads pages as they are saved and drops them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.storage.formats.safetensors_write import write_elements
from composable_fsdp.storage.formats.tree import DeferredTensor, nested_tree, pieces
from composable_fsdp.storage.source import Source, TensorInfo


def write_torch(out: Path, source: Source) -> None:
    """Make the file ``out``, beside which as much space again is used meanwhile."""
    tree = nested_tree(source)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        files: dict[Key, Path] = {}
        for later in _laters(tree):
            if later.key not in files:
                files[later.key] = Path(folder) / str(len(files))
                _spill(later, files[later.key])
        # Not before: small objects made between large ones keep their memory in pieces.
        torch.save(_mapped(tree, files, {}), out)


Key = tuple[str, ...]


def _laters(value: Any) -> Iterator[DeferredTensor]:
    if isinstance(value, DeferredTensor):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _laters(each)


def _spill(later: DeferredTensor, path: Path) -> None:
    with path.open("wb") as file:
        for start, stop in pieces(later.info):
            write_elements(file, later.slices(start, stop))


def _mapped(value: Any, files: dict[Key, Path], mapped: dict[Key, Tensor]) -> Any:
    """``value`` with its tensors mapped from files; one tensor for tied names."""
    if isinstance(value, DeferredTensor):
        if value.key not in mapped:
            mapped[value.key] = _map(value.info, files[value.key])
        return mapped[value.key]
    if isinstance(value, dict):
        return {key: _mapped(each, files, mapped) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, files, mapped) for each in value]
    return value


def _map(info: TensorInfo, path: Path) -> Tensor:
    if not info.numel:
        return torch.empty(info.shape, dtype=info.dtype)
    flat = torch.from_file(str(path), shared=False, size=info.nbytes, dtype=torch.uint8)
    return flat.view(info.dtype).view(info.shape)
