"""What the integrations share: given optimizers, and states that replace another."""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor

from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.storage.commit import folders_in


def shard_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut state that ``optimizer`` made over full parameters to this rank's rows."""
    for parameter, values in optimizer.state.items():
        ref = find_param(parameter)
        if ref is None or not isinstance(values, dict) or parameter.shape == ref.shape:
            continue
        for key, value in values.items():
            # ``step`` has no dimension, as a parameter of one element may have.
            if (
                key != "step"
                and type(value) is Tensor
                and tuple(value.shape) == ref.shape
                and not value.is_meta
            ):
                values[key] = ref.part_of(value).clone()


def next_state(folder: str | os.PathLike[str]) -> str:
    """Return the path of the next state in ``folder``, as ``state-3``."""
    # Committed ones alone: another rank may be in the save already.
    found = folders_in(os.fspath(folder)) if os.path.isdir(folder) else ()
    names = [os.path.basename(each.path) for each in found if each.is_committed]
    states = [re.fullmatch(r"state-(\d+)", name) for name in names]
    number = max((int(each[1]) for each in states if each), default=0) + 1
    return os.path.join(folder, f"state-{number}")
