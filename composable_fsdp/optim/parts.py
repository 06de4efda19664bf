"""An optimizer's own state dict, with this rank's parts as plain tensors."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

from composable_fsdp.optim.per_original import spread
from composable_fsdp.state_dict.sharded import ShardedValue

wants_parts: ContextVar[bool] = ContextVar("wants_parts", default=False)
"""Whether ``optim.state_dict()`` is called by us, who know what parts they are."""


def local_state_dict(optim: torch.optim.Optimizer) -> dict[str, Any]:
    """``optim.state_dict()`` with plain tensors of this rank's shapes, per original."""
    token = wants_parts.set(True)
    try:
        return spread(optim.param_groups, optim.state_dict())
    finally:
        wants_parts.reset(token)


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same state dict with ``local`` in the place of every sharded value."""
    return {
        **state_dict,
        "state": {
            key: {
                name: value.local if isinstance(value, ShardedValue) else value
                for name, value in values.items()
            }
            if isinstance(values, dict)
            else values
            for key, values in state_dict["state"].items()
        },
    }
