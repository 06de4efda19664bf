"""``optim.state_dict()`` of sharded parameters says that it is one rank's part.

torch.distributed.checkpoint takes a plain tensor for one that every rank holds whole:
it would keep one rank's part and give it to all. An optimizer over sharded parameters
therefore gets two hooks when it is first met: its state dict holds ``ShardedValue``,
and ``load_state_dict`` takes those, full tensors and plain parts. It is met at its
first step, before which it has no state, or when a function of ours is given a state
for it.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.optim.consensus import raise_on_all_ranks
from composable_fsdp.optim.flat_state import has_flats
from composable_fsdp.optim.flat_state_dict import (
    flat_part,
    give_flat,
    take_flat,
    take_marks,
)
from composable_fsdp.optim.names import Named, place_of
from composable_fsdp.optim.own_state_dict import is_empty, unwrapped, wants_parts
from composable_fsdp.optim.save import full_state
from composable_fsdp.optim.sharded import as_sharded, mark_partial, part_for
from composable_fsdp.optim.state_exchange import require_same_state
from composable_fsdp.optim.step_checks import cut_leaf
from composable_fsdp.state_dict.dcp_caller import DcpRequest, dcp_request
from composable_fsdp.state_dict.effective_settings import rank_0_is_first
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.traversal import _get_fsdp_states


def install_optimizer_hooks(optim: object) -> None:
    """Give ``optim`` its hooks, if it is torch's and holds parts of parameters."""
    if not isinstance(optim, torch.optim.Optimizer):
        return
    if not hasattr(optim, "_optimizer_state_dict_post_hooks"):
        return  # made without Optimizer.__init__, around one that is met by itself
    parameters = [p for group in optim.param_groups for p in group["params"]]
    if _on_state_dict in optim._optimizer_state_dict_post_hooks.values():
        return
    if not any(find_leaf(p) or find_flat(p) for p in parameters):
        return
    optim.register_state_dict_post_hook(_on_state_dict)
    optim.register_load_state_dict_pre_hook(_on_load_state_dict)
    # Loaded before we met, from a state dict that another optimizer gave.
    take_marks(optim, optim.param_groups)
    for parameter, values in optim.state.items():
        flat = find_flat(parameter)
        if flat is not None:
            for key, value in values.items():
                values[key] = flat_part(flat[1], key, value)
        named = _named(parameter)
        if named is not None:
            for key, value in values.items():
                if isinstance(value, ShardedValue):
                    values[key] = part_for(named, key, value)


def _named(parameter: Any, *, whole: bool = False) -> Named | None:
    """The parameter of a unit, if ranks hold parts of it, or ``whole`` ones count."""
    found = find_leaf(parameter) if whole else cut_leaf(parameter)
    if found is None:
        return None
    region, slot = place_of(*found)
    fqn = join_name(found[0].full_fqn, slot.fqn)
    return Named(fqn, parameter, found[0], region, slot)


def _members(
    optim: torch.optim.Optimizer, groups: Any, *, whole: bool = False
) -> dict[Any, Named]:
    """Parameters of units by the keys that the state dict's ``groups`` use."""
    pairs = zip(groups, optim.param_groups, strict=False)
    return {
        key: named
        for saved, own in pairs
        for key, parameter in zip(saved["params"], own["params"], strict=False)
        if (named := _named(parameter, whole=whole)) is not None
    }


def _on_state_dict(optim: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Any:
    """What ``state_dict()`` returns: sharded values, or what torch's functions ask.

    Of a parameter of which this rank holds no element there is no state: what an
    earlier load left of it would be older than that of the others.

    Collective: none; as ``optim_state_dict`` for the functions of
    ``torch.distributed.checkpoint.state_dict``, which want every parameter's state.
    Raises: CheckpointError, for state that is not element-wise.
    """
    if wants_parts.get():
        return None
    if has_flats(optim.param_groups):
        return give_flat(optim, state_dict)
    asked = dcp_request()
    if asked is not None and asked.full:
        return _full(optim, state_dict, asked)
    # For a checkpoint, whole ones too: a load then looks for holes.
    whole = asked is not None
    members = _members(optim, state_dict["param_groups"], whole=whole)
    state = dict(state_dict["state"])
    with raise_on_all_ranks([] if asked is None else _get_fsdp_states(asked.model)):
        for key, named in members.items():
            if named.is_absent and is_empty(state.get(key, {})):
                state.pop(key, None)
            elif key in state:
                state[key] = _all_shown(named, state[key])
                if asked is None and named.handle is not None:
                    mark_partial(named.handle, state[key], quoted(named.fqn))
    if asked is None:
        if any(named.is_cut and named.has_absent for named in members.values()):
            # Ranks have other entries: to gather one would wait for ranks without.
            for value in chain.from_iterable(
                state[k].values() for k in members if k in state
            ):
                if isinstance(value, ShardedValue):
                    value.home = None
    else:
        told = _exchanged_states(asked.model, members, state_dict["state"])
        state |= {key: _all_shown(members[key], each) for key, each in told.items()}
    return {**state_dict, "state": state}


def _exchanged_states(
    model: nn.Module, members: dict[Any, Named], state: dict[Any, Any]
) -> dict[Any, dict[str, Any]]:
    """The states, by key, of parameters of which this rank holds no element."""
    cut = {key: named for key, named in members.items() if named.is_cut}
    states = [state.get(key, {}) for key in cut]
    by_handle: dict[int, list[int]] = {}
    # By name and not as the optimizer has them: what is sent follows this order.
    for i, named in sorted(enumerate(cut.values()), key=lambda pair: pair[1].fqn):
        by_handle.setdefault(id(named.handle), []).append(i)
    units = _get_fsdp_states(model)
    require_same_state(list(cut.values()), states, by_handle, units)
    return {
        key: values
        for (key, named), values in zip(cut.items(), states, strict=True)
        if named.is_absent and values
    }


def _all_shown(named: Named, values: dict[str, Any]) -> dict[str, Any]:
    return {name: _shown(named, name, value) for name, value in values.items()}


def _shown(named: Named, name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == named.parameter.shape:
        return as_sharded(named, value)
    if not named.is_cut:
        return value
    tensors = [v for v in _pytree.tree_leaves(value) if isinstance(v, Tensor)]
    if not any(tensor.ndim for tensor in tensors):
        return value
    raise CheckpointError(
        f"optim.state_dict() was called with state {name!r} of {named.fqn!r}; expected "
        f"scalars and tensors of this rank's shard, {tuple(named.parameter.shape)}, "
        f"got {[tuple(tensor.shape) for tensor in tensors]}. State that is not "
        "element-wise cannot be put together from shards: use an element-wise "
        "optimizer, and make it hold state only after fully_shard."
    )


def _full(
    optim: torch.optim.Optimizer, given: dict[str, Any], asked: DcpRequest
) -> dict[str, Any]:
    """Full state under the optimizer's own keys; on other ranks maybe no state."""
    handles = [
        named.handle for named in _members(optim, given["param_groups"]).values()
    ]
    first_only = asked.to_cpu and all(h and rank_0_is_first(h.groups) for h in handles)
    full = full_state(
        asked.model, [optim], [given], first_only=first_only, to_cpu=asked.to_cpu
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


def _on_load_state_dict(
    optim: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Any:
    """What ``load_state_dict()`` loads: this rank's part of whatever was passed.

    Raises: CheckpointError, for sharded values of another plan; nothing was loaded.
    """
    state_dict = take_flat(optim, state_dict)
    members = _members(optim, state_dict["param_groups"], whole=True)
    state = {
        key: {
            name: part_for(members[key], name, value) for name, value in values.items()
        }
        if key in members
        else values
        for key, values in state_dict["state"].items()
    }
    for key, named in members.items():
        # No rank saves any; but some optimizers count on the state that they made with
        # the parameter. State from before sharding has the full shape, and is dropped.
        own = optim.state.get(named.parameter)
        if key not in state and named.is_absent and own is not None and is_empty(own):
            state[key] = own
    return unwrapped({**state_dict, "state": state})
