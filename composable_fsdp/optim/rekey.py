"""Convert an optimizer state dict between names and numbers as keys."""

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
    """Return the state dict keyed by parameter names or by the optimizer's numbers.

    The result has new dicts around the same values. A state dict that has the requested
    keys already is returned unchanged.

    Args:
        optim_state_dict: the state dict, ``{"state": ..., "param_groups": ...}``.
        optim_state_key_type: ``PARAM_NAME`` for names of ``model``, or ``PARAM_ID`` for
            numbers, which count the parameters in the order of ``optim.state_dict()``.
        model: the model that gives the names; need not be sharded.
        optim_input: parameters or groups from which the optimizer was or will be made;
            used only without ``optim``. Default: a single group of all parameters.
        optim: the optimizer; default: use ``optim_input``.

    Returns: the state dict with the requested keys.

    Raises: CheckpointError, for a key that ``model`` or ``optim`` does not know, or if
    names and numbers are mixed; TypeError, if ``optim_state_key_type`` is no key type.
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
    # The condition also holds for a state dict without keys, which is in both forms.
    if all(isinstance(key, wanted) for key in keys):
        return optim_state_dict
    own = groups_of(model, optim, optim_input, "rekey_optim_state_dict")
    groups = name_parameters(model, own)
    names = [named.fqn for members in groups for named in members]
    # ``optim.state_dict()`` numbers the parameters through all groups.
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
            # Sort the numbers, because an optimizer assigns numbers by position.
            {**group, "params": sorted(table[key] for key in group["params"])}
            for group in optim_state_dict["param_groups"]
        ],
    }
