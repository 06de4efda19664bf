"""Optimizers that a user made over the plain model and sets up together with it."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.flat.param_ref import find_param


def shard_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut the state that ``optimizer`` made over full parameters to this rank's rows.

    Adagrad makes state in its constructor, and a loaded optimizer has state, too. State
    that fits this rank's rows, and state on meta, stays.
    """
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
