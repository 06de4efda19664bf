"""``optim.state_dict()`` over flat parameters: as it is, and safe to hand on.

State of a flat parameter is a ``ShardedValue`` of ``(padded_numel,)``, so that
torch.distributed.checkpoint keeps all ranks' parts. What lies where in it depends on
the number of ranks; each group therefore says how its flat parameters are laid out, and
a state of another layout is refused where it is loaded. ``optim_state_dict`` has the
form that goes anywhere.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import FlatParamRecord, find_flat
from composable_fsdp.optim.flat_state import has_flats, parts_of, unflatten_state
from composable_fsdp.optim.sharded import mark_partial
from composable_fsdp.optim.step_checks import flat_name
from composable_fsdp.state_dict.dcp_caller import dcp_request
from composable_fsdp.state_dict.sharded import ShardedValue

StateDict = dict[str, Any]

_MARK = "flat_parameters"
"""Key of a group in a state dict: per parameter its layout, empty for an original."""

_ANYWHERE = (
    "Save what optim_state_dict(model, optim) returns, which is by parameter names, "
    "and load it with optim_state_dict_to_load(model, optim, state); or save and load "
    "the native checkpoint."
)


def refuse_torchs_functions() -> None:
    """Refuse flat parameters to torch's state dict functions: they look for names.

    Raises: CheckpointError, if one of them is calling.
    """
    if dcp_request() is not None:
        raise CheckpointError(
            "torch.distributed.checkpoint.state_dict names an optimizer's parameters "
            "by the model's, and got an optimizer over flat parameters, which are none "
            f"of them. {_ANYWHERE}"
        )


def give_flat(optim: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """The state dict with sharded values, and with the layouts in its groups.

    Raises: CheckpointError, as ``refuse_torchs_functions``.
    """
    refuse_torchs_functions()
    state = dict(state_dict["state"])
    groups = []
    for own, saved in zip(optim.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(own["params"], saved["params"], strict=True):
            found = find_flat(parameter)
            if found is not None and key in state:
                state[key] = {k: _shown(found[1], v) for k, v in state[key].items()}
                mark_partial(found[0], state[key], flat_name(*found))
        groups.append({**saved, _MARK: _marks(own)})
    return {**state_dict, "state": state, "param_groups": groups}


def _shown(flat: FlatParamRecord, value: Any) -> Any:
    layout = flat.layout
    if not isinstance(value, Tensor) or value.shape != (layout.shard_numel,):
        return value
    if not layout.padded_numel:
        return value  # no box could tell of it
    return ShardedValue(
        value,
        (layout.padded_numel,),
        0,
        layout.shard_numel,
        flat.rank,
        layout.world_size,
    )


def _marks(group: dict[str, Any]) -> list[str]:
    """Per parameter of a group a fingerprint of what lies where, equal on all ranks."""
    marks = []
    for parameter in group["params"]:
        found = find_flat(parameter)
        mark = ""
        if found is not None:
            layout = found[1].layout
            places = [(p.name, p.slot.offset, p.slot.shape) for p in parts_of(*found)]
            told = repr((layout.world_size, layout.padded_numel, places))
            mark = hashlib.sha256(told.encode()).hexdigest()[:16]
        marks.append(mark)
    return marks


def take_marks(optim: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Take the layouts out of ``groups``, if they are there.

    Raises: CheckpointError, if they are not those of the optimizer.
    """
    told = [group.pop(_MARK, None) for group in groups]
    if all(marks is None for marks in told):
        return
    if told != [_marks(group) for group in optim.param_groups]:
        raise CheckpointError(
            f"The {type(optim).__name__} got a state of flat parameters that are laid "
            "out otherwise than its own: by another number of ranks, another model, or "
            f"it has original parameters. {_ANYWHERE}"
        )


def per_original(optim: torch.optim.Optimizer, given: Any) -> Any:
    """``unflatten_state`` of what ``optim.state_dict()`` returned, or of what is spread
    already.

    Raises: CheckpointError, for another layout, and as ``unflatten_state``.
    """
    if isinstance(given, dict) and "param_groups" in given:
        given = {**given, "param_groups": [dict(g) for g in given["param_groups"]]}
        take_marks(optim, given["param_groups"])
    return unflatten_state(optim.param_groups, given)


def take_flat(optim: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """This rank's part of a state in flat form, to be loaded; others as they are.

    Raises: CheckpointError, for another layout, or a state by numbers of originals.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    take_marks(optim, groups)
    state_dict = {**state_dict, "param_groups": groups}
    if not has_flats(optim.param_groups):
        return state_dict
    refuse_torchs_functions()
    theirs = [len(group["params"]) for group in groups]
    ours = [len(group["params"]) for group in optim.param_groups]
    if theirs != ours:
        raise CheckpointError(
            f"The {type(optim).__name__} has groups of {ours} flat parameters and got "
            f"a state of {theirs}: by numbers of originals nobody can tell whose. "
            f"{_ANYWHERE}"
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


def flat_part(flat: FlatParamRecord, name: str, value: Any) -> Any:
    """This rank's ``(shard_numel,)`` of one state of a flat parameter; or a scalar.

    Raises: CheckpointError, for anything else.
    """
    numel = flat.layout.shard_numel
    if isinstance(value, ShardedValue):
        expected = _shown(flat, value.local)
        if isinstance(expected, ShardedValue) and expected.is_part_like(value):
            return value.local
    elif not isinstance(value, Tensor) or tuple(value.shape) in ((), (numel,)):
        return value
    raise CheckpointError(
        f"Optimizer state {name!r} of a flat parameter has shape {tuple(value.shape)}; "
        f"expected a scalar or this rank's shard, {(numel,)}. {_ANYWHERE}"
    )
