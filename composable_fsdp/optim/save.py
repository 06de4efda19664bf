"""Save optimizer state: gather shards into the plain model's names and shapes."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from composable_fsdp.access.gather import gather_whole, shards_of
from composable_fsdp.access.other_parts import require_all_data
from composable_fsdp.comm.meeting import raise_on_all_ranks
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    StateDictType,
)
from composable_fsdp.flat.param_ref import ParamRef
from composable_fsdp.naming import takes_optimizer
from composable_fsdp.optim.flat_state import (
    Values,
    originals,
    plain_values,
    unflatten_state,
)
from composable_fsdp.optim.names import (
    Named,
    aligned_groups,
    given_names,
    is_absent,
    meet_for_state,
    name_parameters,
    require_pair,
    shard_groups,
    state_by_name,
)
from composable_fsdp.optim.sharded import (
    forget_homes,
    is_empty,
    require_same_state,
    sharded_values,
)
from composable_fsdp.optim.step_checks import require_elementwise
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.settings import get_state_dict_type
from composable_fsdp.state_dict.sharded import local_of
from composable_fsdp.tree.root import outermost
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_states

_WHAT = "optim_state_dict"


@takes_optimizer
def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer state keyed by the plain model's parameter names.

    The result is ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params":
    [fqn, ...]}]}``. The state dict type of the model decides the form of the values:

    * full (default): tensors of the plain model's shapes, on the CPU of every rank;
      with ``rank0_only`` every rank except the first returns ``{}``;
    * sharded: a ``ShardedValue`` in the place of every tensor of a sharded parameter;
    * local: as sharded, without any exchange, so that a rank may ask alone.

    Args:
        model: the sharded model, or a module that contains the sharded model.
        optim: an element-wise optimizer over parameters of ``model``.
        optim_state_dict: what ``optim.state_dict()`` returned. Default: the current
            state.
        group: ignored, because each unit knows its process groups.

    Collective: one all-gather of state names (objects) per shard group; then, for full
    state, per unit and state name one all-gather over the shard group, or with
    ``rank0_only`` one gather per region. All ranks must call. Sharded state needs only
    the exchange of names; local state needs no collective.
    Raises: CompositionError, if the optimizer needs whole parameters, or if units
    differ in their settings; CheckpointError, for state that is not element-wise or a
    parameter that is not in ``model``; DesyncError, if ranks have different state
    names; PhaseError, inside a forward, a backward or ``unshard_params``; TypeError.
    """
    require_pair(model, optim, _WHAT)
    units = _get_fsdp_states(model)
    # Raises if units differ in their settings.
    settings = get_state_dict_type(model) if units else FULL_BY_DEFAULT
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    config = settings.optim_state_dict_config
    first_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    require_elementwise(optim)
    # Each rank's own shards are local, and may be asked for by a rank alone.
    if not is_local:
        kind = settings.state_dict_type.name
        # With and without ``rank0_only`` other collectives are sent.
        first = ("rank0_only=True",) if first_only else ()
        meet_for_state(units, _WHAT, kind, *first)
        for unit in units:
            require_all_data(unit.handle, outermost(unit).handle, _WHAT)
    given = local_state_dict(optim) if optim_state_dict is None else optim_state_dict
    to_cpu = config.offload_to_cpu
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        return full_state(model, optim, given, first_only=first_only, to_cpu=to_cpu)
    groups = [] if is_local else shard_groups(units)
    members, saved = _by_name(model, optim, given, units, groups)
    named = {each.fqn: each for each in members}
    state = sharded_values(named, saved["state"], groups, alone=is_local, units=units)
    if is_local:
        forget_homes(state)
    state = {fqn: _copy(values, to_cpu) for fqn, values in state.items() if values}
    return {**saved, "state": state}


def full_state(
    model: nn.Module,
    optim: Optimizer,
    given: dict[str, Any],
    *,
    first_only: bool,
    to_cpu: bool,
) -> dict[str, Any]:
    """Return full state, of whatever type. Collective: as ``optim_state_dict``."""
    units = _get_fsdp_states(model)
    members, saved = _by_name(model, optim, given, units, shard_groups(units))
    states = [saved["state"].get(named.fqn, {}) for named in members]
    require_same_state(members, states, units)
    # A rank that returns {} still takes part in all collectives.
    wanted = not (first_only and units and not units[0].handle.groups.is_first)
    result: dict[str, Values] = {}
    by_unit: dict[int, list[tuple[Named, Values]]] = {}
    for named, values in zip(members, states, strict=True):
        if values and wanted:
            result[named.fqn] = {
                # Shards of sharded parameters hold the places of the full tensors.
                k: v if named.is_cut and not named.is_scalar(k, v) else _copy(v, to_cpu)
                for k, v in values.items()
            }
        if named.is_cut:
            by_unit.setdefault(id(named.handle), []).append((named, values))
    # By name: the order of the parameters in the optimizer may differ between ranks.
    sorted_units = [sorted(each, key=lambda p: p[0].fqn) for each in by_unit.values()]
    for each in sorted(sorted_units, key=lambda unit: unit[0][0].fqn):
        _gather(each, result, first_only=first_only, to_cpu=to_cpu)
    return {**saved, "state": result} if wanted else {}


def _by_name(
    model: nn.Module,
    optim: Optimizer,
    given: dict[str, Any],
    units: list[_FSDPState],
    groups: list[dist.ProcessGroup],
) -> tuple[list[Named], dict[str, Any]]:
    """Return the optimizer's parameters, and its state with this rank's parts."""
    with raise_on_all_ranks(groups):
        for unit in units:
            require_between_steps(unit, _WHAT)
        table = name_parameters(model, optim.param_groups, given_names(optim))
        saved = unwrapped(state_by_name(given, table, _WHAT))
    # In the order of the model, which is that of every rank: a loop over the result may
    # call ``full_tensor()``.
    place = {id(parameter): n for n, parameter in enumerate(model.parameters())}
    members = sorted(
        table.members, key=lambda m: place.get(id(m.parameter), len(place))
    )
    groups_found = aligned_groups(table, saved)
    return members, {"state": saved["state"], "param_groups": groups_found}


def _copy(value: Any, to_cpu: bool) -> Any:
    """Copy a tensor, or each tensor in nested lists and dicts as LBFGS has them."""
    if isinstance(value, (list, dict)):
        return _pytree.tree_map(partial(_copy, to_cpu=to_cpu), value)
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu" if to_cpu else value.device, copy=True)


def _gather(
    members: list[tuple[Named, Values]],
    result: dict[str, Values],
    *,
    first_only: bool,
    to_cpu: bool,
) -> None:
    """Gather a unit's tensors into ``result``, name by name, by ``gather_whole``."""
    handle = members[0][0].handle
    assert handle is not None
    by_name: dict[str, list[tuple[str, ParamRef, Tensor]]] = {}
    for named, values in members:
        for name, value in values.items():
            if named.ref is not None and not named.is_scalar(name, value):
                by_name.setdefault(name, []).append((named.fqn, named.ref, value))
    # Sorted, because every rank must gather the names in the same order.
    for name in sorted(by_name):
        found = by_name[name]
        # The shards have no name here, so that they are free before the next are made.
        wholes = gather_whole(
            handle,
            shards_of(handle, [(ref, value) for _, ref, value in found]),
            [ref for _, ref, _ in found],
            first_only=first_only,
            to_cpu=to_cpu,
        )
        # With ``first_only`` the other ranks have sent their shards and need no result.
        for (fqn, *_), whole in zip(found, wholes if result else (), strict=False):
            result[fqn][name] = whole


wants_parts: ContextVar[bool] = ContextVar("wants_parts", default=False)
"""True, in this thread, while the package calls ``optim.state_dict()``."""


def local_state_dict(optim: Optimizer) -> dict[str, Any]:
    """Return ``optim.state_dict()`` per original, with plain tensors of this rank."""
    token = wants_parts.set(True)
    try:
        found = optim.state_dict()
    finally:
        wants_parts.reset(token)
    plain = {
        key: plain_values(optim, values) if isinstance(values, dict) else values
        for key, values in found["state"].items()
    }
    found = unflatten_state(optim.param_groups, {**found, "state": plain})
    # State that an earlier load left of a parameter without elements is stale.
    state = dict(found["state"])
    parameters = [p for g in originals(optim.param_groups) for p in g["params"]]
    for number, parameter in enumerate(parameters):
        if is_absent(parameter) and is_empty(state.get(number, {})):
            state.pop(number, None)
    return {**found, "state": state}


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with every sharded value replaced by ``local``."""
    state = {
        key: {name: local_of(value) for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
