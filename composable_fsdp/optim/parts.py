"""An optimizer's own state dict, with this rank's parts as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from composable_fsdp.optim.flat_form import per_original
from composable_fsdp.optim.keys import state_by_name
from composable_fsdp.optim.names import Group, Named, name_parameters
from composable_fsdp.optim.per_original import originals, spread
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


def joined_state(
    model: nn.Module,
    optims: Sequence[torch.optim.Optimizer],
    given: Sequence[dict[str, Any]],
    what: str,
) -> tuple[list[list[Named]], dict[str, Any], list[Group]]:
    """The groups of all optimizers, named; their states by name; the groups themselves.

    ``given`` is what each one's ``state_dict()`` returned. Units must be sharded.

    Raises: CheckpointError, as ``state_by_name``.
    """
    members: list[list[Named]] = []
    own: list[Group] = []
    state: dict[str, Any] = {}
    options: list[Group] = []
    for optim, saved in zip(optims, given, strict=True):
        groups = originals(optim.param_groups)
        names = name_parameters(model, groups)
        saved = per_original(optim, saved)
        saved = unwrapped(state_by_name(saved, model, names, groups, what))
        members += names
        own += groups
        state.update(saved["state"])
        options += saved["param_groups"]
    return members, {"state": state, "param_groups": options}, own
