"""Hooks on ``optim.state_dict()`` and ``load_state_dict()`` for sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.meeting import Call, exchange, meet
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.naming import quoted
from composable_fsdp.optim.flat_state import (
    BY_NAME,
    OriginalView,
    Values,
    flatten_state,
    has_flats,
    originals,
    unflatten_state,
)
from composable_fsdp.optim.names import Named, shard_groups
from composable_fsdp.optim.save import full_state, unwrapped, wants_parts
from composable_fsdp.optim.sharded import (
    forget_homes,
    is_empty,
    mark_partial,
    part_for,
    sharded_values,
)
from composable_fsdp.optim.step_checks import (
    handles_of,
    steps_on_full_params,
)
from composable_fsdp.state_dict.dcp_caller import DcpRequest, dcp_request
from composable_fsdp.state_dict.settings import rank_0_is_first
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_states

Optimizer = torch.optim.Optimizer
StateDict = dict[str, Any]


def install_optimizer_hooks(optim: object) -> None:
    """Register both hooks, if ``optim`` is torch's and holds sharded parameters."""
    if not isinstance(optim, Optimizer) or not hasattr(
        optim, "_optimizer_state_dict_post_hooks"
    ):
        # A wrapper that did not call ``Optimizer.__init__``: the wrapped optimizer gets
        # the hooks at its own step.
        return
    handles = handles_of(optim)
    # Held here, because they would die with the model: an optimizer that lives longer
    # must not show its parts as plain tensors, for one rank to pickle as if whole.
    vars(optim)["_composable_fsdp_units"] = [
        (handle, _get_module_fsdp_state(handle.layout.owners[0])) for handle in handles
    ]
    if not handles or _on_state_dict in optim._optimizer_state_dict_post_hooks.values():
        return
    # DCP takes a plain tensor for a value that every rank holds whole.
    optim.register_state_dict_post_hook(_on_state_dict)
    optim.register_load_state_dict_pre_hook(_on_load_state_dict)
    # State that was loaded before may hold sharded values.
    for parameter, values in optim.state.items():
        ref = find_param(parameter)
        for key, value in values.items():
            if isinstance(value, ShardedValue) and find_flat(parameter) is not None:
                raise CheckpointError(
                    f"{type(optim).__name__} over flat parameters got the state of "
                    f"{quoted(key)} before its first step, and could not join it. "
                    f"{BY_NAME}"
                )
            if isinstance(value, ShardedValue) and ref is not None:
                values[key] = part_for(Named(ref.name, parameter, ref), key, value)


def originals_of(optim: Any) -> OriginalView:
    """Take up state that was loaded before; return a view of ``optim`` by originals."""
    install_optimizer_hooks(optim)
    return OriginalView(optim)


def prepare_for_dcp(optim: object) -> bool:
    """Register both hooks; return whether some rank uses ``optim``, by an exchange."""
    install_optimizer_hooks(optim)
    if not isinstance(optim, Optimizer):
        return False
    steps_on_full_params(optim)
    grads = (p.grad for group in optim.param_groups for p in group["params"])
    is_used = bool(optim.state) or any(grad is not None for grad in grads)
    # A rank that asks alone must not come to the exchange.
    groups = _met(optim, handles_of(optim), "state_dict or load_state_dict of DCP")
    for group in groups:
        is_used = any(each.value for each in exchange(None, is_used, group))
    return is_used


def _met(
    optim: Optimizer, handles: Sequence[Any], what: str
) -> list[dist.ProcessGroup]:
    """Return the shard groups of the units, whose ranks have all called ``what``."""
    groups = [handle.groups.shard for handle in handles]
    found = list(dict.fromkeys(group for group in groups if group is not None))
    meet(found, Call(what, type(optim).__name__))
    return found


def _members(optim: Optimizer, groups: Any) -> dict[Any, Named]:
    """Return parameters of units by the keys that ``groups`` of the state dict use."""
    return {
        key: Named(ref.name, parameter, ref)
        for saved, own in zip(groups, originals(optim.param_groups), strict=False)
        for key, parameter in zip(saved["params"], own["params"], strict=False)
        if (ref := find_param(parameter)) is not None
    }


def _on_state_dict(optim: Optimizer, state_dict: StateDict) -> Any:
    """Return the state dict with sharded values, or in the form torch asks for."""
    if wants_parts.get():
        return None
    _refuse_torchs_functions(optim)
    state_dict = unflatten_state(optim.param_groups, state_dict)
    asked = dcp_request()
    if asked is None:
        return _own(optim, state_dict)
    if asked.full:
        return _full(optim, state_dict, asked)
    # In a checkpoint, what every rank holds whole is a sharded value, too, so that a
    # load checks that the file has all elements.
    members = _members(optim, state_dict["param_groups"])
    units = _get_fsdp_states(asked.model)
    given, groups = state_dict["state"], shard_groups(units)
    state = sharded_values(members, given, groups, alone=False, units=units)
    return {**state_dict, "state": state}


def _own(optim: Optimizer, state_dict: StateDict) -> StateDict:
    """Return what a user sees. Collective: names, for units of FSDP2's door."""
    found = _members(optim, state_dict["param_groups"])
    members = {key: named for key, named in found.items() if named.is_cut}
    absent = [named for named in members.values() if named.has_absent]
    # Equal on all ranks: the plan says which parameters a rank lacks. As FSDP2, which
    # keeps state of every parameter on every rank, with empty tensors.
    handles = [named.handle for named in absent if named.handle is not None]
    if not all(handle.rule.keeps_empty for handle in handles):
        handles = []
    groups = _met(optim, handles, "optimizer.state_dict()")
    state = sharded_values(members, state_dict["state"], groups, alone=not groups)
    shown = {key: state[key] for key in members if key in state}
    for key, values in shown.items():
        mark_partial(members[key], values)
    if absent and not groups:
        forget_homes(shown)
    return {**state_dict, "state": state}


def _refuse_torchs_functions(optim: Optimizer) -> None:
    """Raise CheckpointError if a function of DCP asks about flat parameters."""
    if dcp_request() is not None and has_flats(optim.param_groups):
        raise CheckpointError(
            "torch.distributed.checkpoint.state_dict names an optimizer's parameters "
            "by the model's, and got an optimizer over flat parameters, which are none "
            f"of them. {BY_NAME}"
        )


def _full(optim: Optimizer, given: StateDict, asked: DcpRequest) -> StateDict:
    """Return full state under the optimizer's own keys. Collective: ``full_state``."""
    # Units of which this rank holds parts, in the optimizer's order.
    members = _members(optim, given["param_groups"]).values()
    cut = [named for named in members if named.is_cut]
    handles = [named.handle for named in cut if named.handle is not None]
    first_only = asked.to_cpu and all(rank_0_is_first(h.groups) for h in handles)
    full = full_state(
        asked.model, optim, given, first_only=first_only, to_cpu=asked.to_cpu
    )
    if not full:
        return {"state": {}, "param_groups": given["param_groups"]}
    keys = {
        name: key
        for named, own in zip(full["param_groups"], given["param_groups"], strict=True)
        for name, key in zip(named["params"], own["params"], strict=True)
    }
    return {
        "state": {keys[name]: values for name, values in full["state"].items()},
        "param_groups": given["param_groups"],
    }


def _on_load_state_dict(optim: Optimizer, state_dict: StateDict) -> Any:
    """Return this rank's part of the given state dict, ready to load."""
    _refuse_torchs_functions(optim)
    members = _members(optim, state_dict["param_groups"])
    state = {
        key: _parts(members[key], values) if key in members else values
        for key, values in state_dict["state"].items()
    }
    for key, named in members.items():
        # Ranks without elements save no state, but optimizers that create state in
        # their constructor need the entry. State from before sharding is dropped.
        own = optim.state.get(named.parameter)
        if key not in state and named.is_absent and own is not None and is_empty(own):
            state[key] = own
    found = unwrapped({**state_dict, "state": state})
    return flatten_state(optim.param_groups, found)


def _parts(named: Named, values: Values) -> Values:
    """Return this rank's part of the state of a parameter."""
    # Of a 0-d parameter, the shape of another state tells parts from full values.
    are_parts = named.shape == () != named.parameter.shape and any(
        isinstance(value, Tensor) and value.shape == named.parameter.shape
        for value in values.values()
    )
    return {
        name: value
        if are_parts and isinstance(value, Tensor) and not value.shape
        else part_for(named, name, value)
        for name, value in values.items()
    }
