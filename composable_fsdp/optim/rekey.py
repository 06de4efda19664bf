"""Names to numbers and back in an optimizer's state dict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from composable_fsdp.config import OptimStateKeyType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.names import groups_of, name_parameters
from composable_fsdp.planning.options import by_name


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return the state with parameter names as keys, or with the optimizer's numbers.

    ``{"state", "param_groups"}`` of new dicts around the same values; what has such
    keys already is returned as it is. ``PARAM_ID`` counts the parameters of ``optim``
    (or of ``optim_input``, what it was or will be made from) in their order, which is
    that of ``optim.state_dict()``; names are those of ``model``, which need not be
    sharded. Values are left as they are. Sends nothing.

    Raises: CheckpointError, for a key that ``model`` or ``optim`` does not know, or
    names and numbers mixed; TypeError, for something else than a key type.
    """
    kind = by_name(
        OptimStateKeyType, optim_state_key_type, argument="optim_state_key_type"
    )
    if not {"state", "param_groups"} <= set(optim_state_dict):
        raise CheckpointError(
            "rekey_optim_state_dict expects a dict with the keys 'state' and "
            f"'param_groups', got {sorted(map(str, optim_state_dict))}. Pass what "
            "optim_state_dict(model, optim) returned."
        )
    wanted, have = (str, int) if kind is OptimStateKeyType.PARAM_NAME else (int, str)
    keys = list(optim_state_dict["state"])
    for group in optim_state_dict["param_groups"]:
        keys.extend(group["params"])
    if all(isinstance(key, wanted) for key in keys):
        return optim_state_dict
    own = groups_of(model, optim, optim_input, "rekey_optim_state_dict")
    groups = name_parameters(model, own)
    names = [named.fqn for members in groups for named in members]
    table: dict[Any, Any] = dict(enumerate(names))
    if wanted is int:
        table = {name: number for number, name in table.items()}
    unknown = [key for key in keys if not isinstance(key, have) or key not in table]
    if unknown:
        raise CheckpointError(
            f"rekey_optim_state_dict to {kind.name} expects the keys {list(table)[:3]} "
            f"and so on, {len(table)} in all; got {unknown[:3]} besides. Pass the "
            "model and the optimizer that the state was saved with."
        )
    return {
        "state": {table[k]: v for k, v in optim_state_dict["state"].items()},
        "param_groups": [
            # Sorted, because an optimizer takes its numbers by position.
            {**group, "params": sorted(table[key] for key in group["params"])}
            for group in optim_state_dict["param_groups"]
        ],
    }
