"""Load optimizer state: cut a plain model's state into this rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.access.other_parts import Route, refuse_forms
from composable_fsdp.comm.meeting import Call, meet, require_success_on_all_ranks
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    StateDictType,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted, takes_optimizer
from composable_fsdp.optim.keys import aligned_groups, state_by_name
from composable_fsdp.optim.names import (
    Group,
    Named,
    given_names,
    groups_of,
    meet_for_state,
    name_parameters,
    require_pair,
)
from composable_fsdp.optim.save import full_state, local_state_dict, sharded_state
from composable_fsdp.optim.sharded import part_for, part_problem, unlike_part
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import needs_whole_params, require_elementwise
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.sent import (
    Described,
    routes_of,
    send,
    share_structure,
    unpacked,
)
from composable_fsdp.state_dict.settings import get_state_dict_type
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.traversal import _get_fsdp_states, require_module


@takes_optimizer
def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a state, ready for ``optim.load_state_dict``.

    A parameter that no unit shards may be missing from the state; the parameter then
    has no state after the load.

    Args:
        model: the sharded model, or a module that contains the sharded model.
        optim: the optimizer that will load the result.
        optim_state_dict: the state that ``optim_state_dict`` returned, at any world
            size, or the state of a plain model, keyed by names or by numbers (positions
            in the groups of ``optim``). Every rank passes the full state, except: with
            ``rank0_only`` the first rank passes the state and sends it to all ranks;
            for the local type every rank passes its own state. Sharded values are
            accepted in the place of full tensors if they belong to the same plan or
            their process group is known; the latter are gathered.
        is_named_optimizer: keep names as keys; default: the optimizer's numbers.
        load_directly: also call ``optim.load_state_dict`` with the result; default:
            only return the result.
        group: with ``rank0_only``, the ranks to which the first rank sends; default:
            the ranks of the model.

    Collective: none; with ``rank0_only`` one broadcast of the structure, one all-gather
        of error texts, and one broadcast per tensor. A sharded value of another plan is
        gathered by one broadcast from each rank that holds elements.
    Raises: CheckpointError, listing names that are missing, left over or of another
        shape; CompositionError, as ``optim_state_dict``. Nothing is loaded then.
    """
    require_pair(model, optim, "optim_state_dict_to_load")
    units = _get_fsdp_states(model)
    # Raises if units differ in their settings.
    settings = get_state_dict_type(model) if units else FULL_BY_DEFAULT
    config = settings.optim_state_dict_config
    require_elementwise(optim)
    # The optimizer may get state before its first step.
    install_optimizer_hooks(optim)
    result = state_to_load(
        model,
        optim.param_groups,
        optim_state_dict,
        named=is_named_optimizer,
        elementwise=not needs_whole_params(optim),
        local=settings.state_dict_type is StateDictType.LOCAL_STATE_DICT,
        from_first=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
        group=group,
        given=given_names(optim),
    )
    if load_directly:
        optim.load_state_dict(result)
    return result


def state_to_load(
    model: nn.Module,
    param_groups: list[Group],
    saved: Any,
    *,
    named: bool = False,
    elementwise: bool = True,
    local: bool = False,
    from_first: bool = False,
    group: dist.ProcessGroup | None = None,
    given: Mapping[int, str] | None = None,
    what: str = "optim_state_dict_to_load",
) -> dict[str, Any]:
    """Cut this rank's parts out of ``saved``; see ``optim_state_dict_to_load``."""
    require_module(model, what)
    units = _get_fsdp_states(model)
    handles = [unit.handle for unit in units]
    ranks, senders = routes_of(units, group) if from_first else ((), ())
    if from_first:
        # The first rank sends over the data ranks alone.
        refuse_forms(handles, f"{what} with rank0_only")
        # Only the call is compared, because the state is the first rank's.
        meet(ranks, Call(what, details=("rank0_only=True",)))
    shared = share_structure(saved, senders)
    with require_success_on_all_ranks(ranks):
        saved = unpacked(shared)
        for state in units:
            require_between_steps(state, what)
        table = name_parameters(model, param_groups, given)
        saved = state_by_name(saved, table, what)
        # Before the first tensor is gathered or broadcast.
        _require_fit(
            table.members, saved, elementwise=elementwise, from_first=bool(senders)
        )
    # No rank sends, so only meetings tell that a rank loads alone.
    if not local and not from_first:
        meet_for_state(units, what, replicas=True)
    state_of = _own_state(table.members, saved["state"], senders)
    groups = aligned_groups(table, saved)
    names = [name for group in groups for name in group["params"]]
    keys: dict[str, Any] = {name: name if named else i for i, name in enumerate(names)}
    return {
        "state": {keys[name]: state_of[name] for name in names if name in state_of},
        "param_groups": [
            {**group, "params": [keys[name] for name in group["params"]]}
            for group in groups
        ],
    }


def _own_state(
    members: list[Named], saved: Mapping[str, Mapping[str, Any]], senders: Route
) -> dict[str, dict[str, Any]]:
    """Return copies of this rank's state by name. Collective: those of ``_part``."""
    found = {}
    # By name: the order of parameters may differ between ranks.
    for member in sorted(members, key=attrgetter("fqn")):
        values = saved.get(member.fqn, {})
        parts = {k: _part(member, k, values[k], senders) for k in sorted(values)}
        # No step would update state of a parameter without elements here. In the saved
        # order of the state names, as a plain optimizer has them.
        if member.fqn in saved and not member.is_absent:
            found[member.fqn] = {name: parts[name] for name in values}
    return found


def _part(named: Named, name: str, value: Any, senders: Route) -> Any:
    """Return a copy of this rank's part. Collective: a broadcast per sending group."""
    # A function, so that the whole is freed before the next is made.
    handle = named.handle
    device = named.parameter.device if handle is None else handle.layout.device
    # Scalars were sent with the structure.
    if senders and isinstance(value, (Tensor, Described)) and value.shape:
        value = send(value, senders, device)
    # Of another plan, which is equal on all ranks: all gather, or none.
    if isinstance(value, ShardedValue) and unlike_part(named, value):
        value = value.full_tensor()
    part = part_for(named, name, value)
    # A view would keep the full tensor alive, and the optimizer would write into it.
    return part.clone() if isinstance(part, Tensor) else part


def _require_fit(
    members: list[Named], saved: dict[str, Any], *, elementwise: bool, from_first: bool
) -> None:
    """Refuse values of another shape, and parts that no rank can use."""
    for named in members:
        for name, value in saved["state"].get(named.fqn, {}).items():
            who = f"Optimizer state {name!r} of {quoted(named.fqn)}"
            is_tensor = isinstance(value, (Tensor, Described))
            shape = tuple(value.shape) if is_tensor else ()
            if shape not in ((), named.shape) and (elementwise or named.is_cut):
                raise CheckpointError(
                    f"{who} has shape {shape}; expected a scalar or the parameter's "
                    f"full shape {named.shape}. Pass what optim_state_dict(model, "
                    "optim) returned; optim.state_dict() of a sharded model is one "
                    "rank's."
                )
            problem = part_problem(named, value, from_first=from_first)
            if problem:
                raise CheckpointError(f"{who}: {problem}")


# FSDP1's older functions, whose names decide the type, whatever ``set_state_dict_type``
# says. ``optim_input`` has the parameters or groups of an optimizer that does not exist
# yet; it is used only where ``optim`` is None. Default: a group of all parameters.


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Iterable[Any] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return full state on the CPU, by names; ``{}`` elsewhere with ``rank0_only``.

    ``optim_input`` and ``group`` are ignored. Collective, Raises: as
    ``optim_state_dict`` for the full type.
    """
    given = _current(model, optim, "full_optim_state_dict", first_only=rank0_only)
    return full_state(model, optim, given, first_only=rank0_only, to_cpu=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return a state dict to load, of a state that every rank holds in full."""
    what = "shard_full_optim_state_dict"
    return _to_load(full_optim_state_dict, model, optim, optim_input, what)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Return a state dict to load, of a full state that only the first rank holds.

    Other ranks may pass None. ``group``: the ranks that take part; default: the ranks
    of the model.

    Collective: one broadcast of the structure, one all-gather of error texts, and one
        broadcast per tensor, over ``group``; all its ranks must call.
    Raises: as ``optim_state_dict_to_load``, on all ranks alike.
    """
    saved, what = full_optim_state_dict, "scatter_full_optim_state_dict"
    how = {"from_first": True, "group": group}
    return _to_load(saved, model, optim, optim_input, what, **how)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the state as copies in sharded values, by names; ``group`` is ignored.

    Collective, Raises: as ``optim_state_dict`` for the sharded type.
    """
    given = _current(model, optim, "sharded_optim_state_dict")
    return sharded_state(model, optim, given, to_cpu=False)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return a state dict to load, of a state in sharded values.

    Collective, Raises: as ``optim_state_dict_to_load``.
    """
    what = "flatten_sharded_optim_state_dict"
    require_pair(model, optim, what)
    return _to_load(sharded_optim_state_dict, model, optim, None, what)


def _current(
    model: nn.Module, optim: Optimizer, what: str, *, first_only: bool = False
) -> dict[str, Any]:
    """Return the optimizer's own state, after all ranks have called ``what``."""
    require_pair(model, optim, what)
    meet_for_state(_get_fsdp_states(model), what, first_only=first_only)
    return local_state_dict(optim)


def _to_load(
    saved: Any, model: nn.Module, optim: Any, optim_input: Any, what: str, **how: Any
) -> dict[str, Any]:
    """Return this rank's part of a state, for an optimizer or for its parameters."""
    groups = groups_of(model, optim, optim_input, what)
    # The optimizer may get state before its first step.
    install_optimizer_hooks(optim)
    return state_to_load(model, groups, saved, what=what, **how)
