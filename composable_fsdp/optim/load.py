"""Load optimizer state: cut a plain model's state into this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.access.other_parts import Route, refuse_forms
from composable_fsdp.comm.consensus import require_success_on_all_ranks
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    StateDictType,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted, takes_optimizer
from composable_fsdp.optim.flat_state import flatten_state
from composable_fsdp.optim.keys import aligned_groups, state_by_name
from composable_fsdp.optim.names import (
    Group,
    Named,
    Optimizers,
    Table,
    given_names,
    meet_for_state,
    name_parameters,
    require_pairs,
)
from composable_fsdp.optim.sharded import part_for, part_problem, whole_of_other
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
from composable_fsdp.tree.traversal import _get_fsdp_states, require_module


@overload
def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]: ...


@overload
def optim_state_dict_to_load(
    model: nn.Module,
    optim: Sequence[Optimizer],
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> list[dict[str, Any]]: ...


@takes_optimizer
def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizers,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return this rank's part of a state, ready for ``optim.load_state_dict``.

    A parameter that no unit shards may be missing from the state; the parameter then
    has no state after the load.

    Args:
        model: the sharded model, or a module that contains the sharded model.
        optim: the optimizer that will load the result, or a list of optimizers whose
            parameters together are the parameters of the state.
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

    Returns: a state dict, or a list of state dicts if ``optim`` is a list.
    Collective: none; with ``rank0_only`` one broadcast of the structure, one all-gather
        of error texts, and one broadcast per tensor. A sharded value of another plan is
        gathered by one broadcast from each rank that holds elements.
    Raises: CheckpointError, listing names that are missing, left over or of another
        shape; CompositionError, as ``optim_state_dict``. No optimizer has loaded then.
    """
    optims = require_pairs(model, optim, "optim_state_dict_to_load")
    units = _get_fsdp_states(model)
    # Raises if units differ in their settings.
    settings = get_state_dict_type(model) if units else FULL_BY_DEFAULT
    config = settings.optim_state_dict_config
    for each in optims:
        require_elementwise(each)
        # The optimizer may get state before its first step.
        install_optimizer_hooks(each)
    results = state_to_load(
        model,
        [each.param_groups for each in optims],
        optim_state_dict,
        named=is_named_optimizer,
        elementwise=[not needs_whole_params(each) for each in optims],
        local=settings.state_dict_type is StateDictType.LOCAL_STATE_DICT,
        from_first=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
        group=group,
        given={key: name for o in optims for key, name in given_names(o).items()},
    )
    if load_directly:
        for each, result in zip(optims, results, strict=True):
            each.load_state_dict(result)
    return results if isinstance(optim, (list, tuple)) else results[0]


def state_to_load(
    model: nn.Module,
    groups_of: list[list[Group]],
    saved: Any,
    *,
    named: bool = False,
    elementwise: Sequence[bool] = (True,),
    local: bool = False,
    from_first: bool = False,
    group: dist.ProcessGroup | None = None,
    given: Mapping[int, str] | None = None,
    what: str = "optim_state_dict_to_load",
) -> list[dict[str, Any]]:
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
        tables = [name_parameters(model, each, given) for each in groups_of]
        joined = Table.joined(model, tables)
        saved = state_by_name(saved, joined, what)
        # Before the first tensor is gathered or broadcast.
        for table, each in zip(tables, elementwise, strict=True):
            first = bool(senders)
            _require_fit(table.members, saved, elementwise=each, from_first=first)
    # No rank sends, so only meetings tell that a rank loads alone.
    if not local and not from_first:
        meet_for_state(units, what, replicas=True)
    state_of = _own_state(joined.members, saved["state"], senders)
    options = [aligned_groups(table, saved) for table in tables]
    chosen = [_chosen(state_of, each, named=named) for each in options]
    # A state keyed by names stays per original, because flat parameters have no names.
    return chosen if named else list(map(flatten_state, groups_of, chosen))


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
    part = part_for(named, name, whole_of_other(named, value, device))
    # A view would keep the full tensor alive, and the optimizer would write into it.
    return part.clone() if isinstance(part, Tensor) else part


def _chosen(
    state_of: dict[str, dict[str, Any]], groups: list[Group], *, named: bool
) -> dict[str, Any]:
    """Return the state of the parameters in ``groups``, keyed by name or by number."""
    names = [name for group in groups for name in group["params"]]
    keys: dict[str, Any] = {name: name if named else i for i, name in enumerate(names)}
    return {
        "state": {keys[name]: state_of[name] for name in names if name in state_of},
        "param_groups": [
            {**group, "params": [keys[name] for name in group["params"]]}
            for group in groups
        ],
    }


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
