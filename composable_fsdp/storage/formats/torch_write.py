"""A ``torch.save`` file, written without holding its tensors in memory.

``torch.save`` takes a whole dictionary. So elements go to files of their own first, and
are mapped from there: the system reads pages as they are saved and drops them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.storage.formats.safetensors_write import write_elements
from composable_fsdp.storage.formats.tree import Later, nested_tree, pieces
from composable_fsdp.storage.source import Source


def write_torch(out: Path, source: Source) -> None:
    """Make the file ``out``, beside which as much space again is used meanwhile."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        mapped: dict[tuple[str, ...], Tensor] = {}
        tree = _mapped(nested_tree(source), Path(folder), mapped)
        torch.save(tree, out)


def _mapped(value: Any, folder: Path, mapped: dict[tuple[str, ...], Tensor]) -> Any:
    """``value`` with its tensors mapped from files; one tensor for tied names."""
    if isinstance(value, Later):
        if value.key not in mapped:
            mapped[value.key] = _spill(value, folder / str(len(mapped)))
        return mapped[value.key]
    if isinstance(value, dict):
        return {key: _mapped(each, folder, mapped) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, folder, mapped) for each in value]
    return value


def _spill(later: Later, path: Path) -> Tensor:
    info = later.info
    if not info.numel:
        return torch.empty(info.shape, dtype=info.dtype)
    with path.open("wb") as file:
        for start, stop in pieces(info):
            write_elements(file, later.slices(start, stop))
    flat = torch.from_file(str(path), shared=False, size=info.nbytes, dtype=torch.uint8)
    return flat.view(info.dtype).view(info.shape)
