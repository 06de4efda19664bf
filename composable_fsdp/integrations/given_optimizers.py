"""What the integrations share: given optimizers, and full states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.config import FullStateDictConfig, StateDictType
from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.state_dict.settings import state_dict_type


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


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the full state dict in host memory of the first rank; empty elsewhere."""
    # As accelerate and Lightning do for torch's FSDP.
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with state_dict_type(module, StateDictType.FULL_STATE_DICT, config):
        return module.state_dict()
