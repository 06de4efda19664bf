"""Lets ``load_from_checkpoint`` of Lightning read a sharded checkpoint.

``load_from_checkpoint`` opens its path as a file, through the name ``pl_load`` of
``lightning.pytorch.core.saving`` (checked on Lightning 2.6.6). The function below takes
the place of that name; for every path but a sharded checkpoint of this library it calls
Lightning's own function.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.core import saving
from torch import Tensor
from torch.utils import _pytree

from composable_fsdp.integrations.lightning.checkpoints import (
    is_sharded_checkpoint,
    read_whole,
)


def install() -> None:
    """Take the place of ``pl_load``, once per process."""
    # The module may be reloaded, as in notebooks.
    if not isinstance(saving.pl_load, _Reader):
        saving.pl_load = _Reader(saving.pl_load)


class _Reader:
    """Reads sharded checkpoints, and leaves all others to ``own``."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __call__(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        # Users also pass open files.
        is_path = isinstance(path, (str, os.PathLike))
        if not is_path or not is_sharded_checkpoint(path):
            return self._own(path, map_location=map_location, weights_only=weights_only)
        # ``load_from_checkpoint`` also runs without a process group.
        whole = read_whole(path, weights_only)
        # A function or a table, as Lightning's default, chooses for devices that
        # storages were on; here all are on the CPU.
        if not isinstance(map_location, (str, int, torch.device)):
            return whole
        return _pytree.tree_map_only(Tensor, lambda each: each.to(map_location), whole)


install()
