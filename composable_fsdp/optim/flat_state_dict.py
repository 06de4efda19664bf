"""State dicts of an optimizer over flat parameters, saved and loaded.

State of a flat parameter becomes a ``ShardedValue`` of shape ``(padded_numel,)``. The
position of each parameter in that value depends on the world size; each group therefore
stores a fingerprint of the layout of its flat parameters, and loading refuses another
layout. For a state that does not depend on the layout, use ``optim_state_dict``.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.optim.flat_state import (
    BY_NAME,
    flat_part,
    has_flats,
    parts_of,
    sharded_state,
    unflatten_state,
)
from composable_fsdp.optim.sharded import mark_partial
from composable_fsdp.optim.step_checks import flat_name
from composable_fsdp.state_dict.dcp_caller import dcp_request

StateDict = dict[str, Any]

_MARK = "flat_parameters"
"""Key of a group in a state dict: per parameter the fingerprint of its layout; an empty
string for an original."""


def refuse_torchs_functions() -> None:
    """Raise if a function of ``torch.distributed.checkpoint.state_dict`` is calling.

    Raises: CheckpointError.
    """
    # torch's functions look up each parameter of the optimizer by its name in the
    # model, and flat parameters have no name there.
    if dcp_request() is not None:
        raise CheckpointError(
            "torch.distributed.checkpoint.state_dict names an optimizer's parameters "
            "by the model's, and got an optimizer over flat parameters, which are none "
            f"of them. {BY_NAME}"
        )


def give_flat(optim: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Return the state dict with sharded values, and with fingerprints in its groups.

    Raises: CheckpointError, as ``refuse_torchs_functions``.
    """
    refuse_torchs_functions()
    state = dict(state_dict["state"])
    groups = []
    for own, saved in zip(optim.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(own["params"], saved["params"], strict=True):
            found = find_flat(parameter)
            if found is not None and key in state:
                state[key] = {
                    k: sharded_state(found[1], v) for k, v in state[key].items()
                }
                mark_partial(found[0], state[key], flat_name(*found))
        groups.append({**saved, _MARK: _marks(own)})
    return {**state_dict, "state": state, "param_groups": groups}


def _marks(group: dict[str, Any]) -> list[str]:
    """Return a layout fingerprint per parameter of a group; equal on all ranks."""
    marks = []
    for parameter in group["params"]:
        found = find_flat(parameter)
        mark = ""
        if found is not None:
            layout = found[1].layout
            # The slots of this layout: ``ParamRef.slot`` is that of the current one.
            pairs = zip(parts_of(*found), layout.parameters, strict=True)
            places = [(part.name, s.offset, s.shape) for part, s in pairs]
            # Use only values that are equal on all ranks: a checkpoint of all ranks has
            # a single copy of the groups.
            told = repr((layout.world_size, layout.padded_numel, places))
            mark = hashlib.sha256(told.encode()).hexdigest()[:16]
        marks.append(mark)
    return marks


def take_marks(optim: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Remove the fingerprints from ``groups``, if there are any, and check them.

    Raises: CheckpointError, if they differ from those of the optimizer.
    """
    told = [group.pop(_MARK, None) for group in groups]
    if all(marks is None for marks in told):
        return
    if told != [_marks(group) for group in optim.param_groups]:
        raise CheckpointError(
            f"The {type(optim).__name__} got a state of flat parameters that are laid "
            "out otherwise than its own: by another number of ranks, another model, or "
            f"it has original parameters. {BY_NAME}"
        )


def per_original(optim: torch.optim.Optimizer, given: Any) -> Any:
    """Return ``unflatten_state`` of a state dict, in flat form or per original already.

    Raises: CheckpointError, for another layout, and as ``unflatten_state``.
    """
    if isinstance(given, dict) and "param_groups" in given:
        # Copy the groups, because ``take_marks`` removes keys and ``given`` is the
        # caller's.
        given = {**given, "param_groups": [dict(g) for g in given["param_groups"]]}
        take_marks(optim, given["param_groups"])
    return unflatten_state(optim.param_groups, given)


def take_flat(optim: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Return this rank's part of a state dict in flat form, ready to load.

    Raises: CheckpointError, for another layout, or for a state that counts originals.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    take_marks(optim, groups)
    state_dict = {**state_dict, "param_groups": groups}
    if not has_flats(optim.param_groups):
        return state_dict
    refuse_torchs_functions()
    theirs = [len(group["params"]) for group in groups]
    ours = [len(group["params"]) for group in optim.param_groups]
    # A state that counts originals has longer groups; its numbers cannot be assigned to
    # flat parameters without the layout.
    if theirs != ours:
        raise CheckpointError(
            f"The {type(optim).__name__} has groups of {ours} flat parameters and got "
            f"a state of {theirs}: by numbers of originals nobody can tell whose. "
            f"{BY_NAME}"
        )
    state = dict(state_dict["state"])
    for own, saved in zip(optim.param_groups, groups, strict=True):
        for parameter, key in zip(own["params"], saved["params"], strict=True):
            found = find_flat(parameter)
            if found is not None and key in state:
                state[key] = {
                    name: flat_part(found[1], name, value)
                    for name, value in state[key].items()
                }
    return {**state_dict, "state": state}
