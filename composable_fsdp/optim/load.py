"""Load optimizer state: cut a plain model's state into this rank's shards."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from composable_fsdp.access.other_parts import Route, refuse_forms
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call, meet, require_success_on_all_ranks
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    StateDictType,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted, takes_optimizer
from composable_fsdp.optim.names import (
    Named,
    Table,
    aligned_groups,
    given_names,
    made_over,
    meet_for_state,
    name_parameters,
    require_pair,
    state_by_name,
)
from composable_fsdp.optim.save import full_state, local_state_dict, sharded_state
from composable_fsdp.optim.sharded import part_for, part_problem, unlike_part
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import needs_whole_params, require_elementwise
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.settings import get_state_dict_type
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_states

_WHAT = "optim_state_dict_to_load"


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

    Collective: none; with ``rank0_only`` one broadcast of the names, one all-gather
        of error texts, and one broadcast of an object per parameter. A sharded value of
        another plan is gathered by one broadcast from each rank that holds elements.
    Raises: CheckpointError, listing names that are missing, left over or of another
        shape; CompositionError, as ``optim_state_dict``. Nothing is loaded then.
    """
    require_pair(model, optim, _WHAT)
    units = _get_fsdp_states(model)
    # Raises if units differ in their settings.
    settings = get_state_dict_type(model) if units else FULL_BY_DEFAULT
    config = settings.optim_state_dict_config
    result = _to_load(
        model,
        optim,
        optim_state_dict,
        _WHAT,
        named=is_named_optimizer,
        local=settings.state_dict_type is StateDictType.LOCAL_STATE_DICT,
        from_first=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
        group=group,
    )
    if load_directly:
        optim.load_state_dict(result)
    return result


def _to_load(
    model: nn.Module,
    optim: Any,
    saved: Any,
    what: str,
    *,
    named: bool = False,
    local: bool = False,
    from_first: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Cut this rank's parts out of ``saved``; see ``optim_state_dict_to_load``."""
    require_pair(model, optim, what)
    require_elementwise(optim)
    # The optimizer may get state before its first step.
    install_optimizer_hooks(optim)
    units = _get_fsdp_states(model)
    ranks, senders = _routes_of(units, group) if from_first else ((), ())
    is_first = all(each.rank() == 0 for each in senders)
    if from_first:
        # The first rank sends over the data ranks alone.
        refuse_forms([unit.handle for unit in units], f"{what} with rank0_only")
        # Only the call is compared, because the state is the first rank's.
        meet(ranks, Call(what, details=("rank0_only=True",)))
    outline = _shared(_outline(saved), senders) if senders else None
    with require_success_on_all_ranks(ranks):
        for state in units:
            require_between_steps(state, what)
        table = name_parameters(model, optim.param_groups, given_names(optim))
        saved = state_by_name(saved if is_first else outline, table, what)
        # Before the first tensor is gathered or sent.
        if is_first:
            _require_fit(optim, table, saved["state"], from_first=bool(senders))
    # No rank sends, so only meetings tell that a rank loads alone.
    if not local and not from_first:
        meet_for_state(units, what, replicas=True)
    state_of = {}
    # By name: the order of parameters may differ between ranks.
    for member in sorted(table.members, key=attrgetter("fqn")):
        if member.fqn in saved["state"]:
            values = _shared(saved["state"][member.fqn], senders)
            parts = {key: _part(member, key, values[key]) for key in sorted(values)}
            # No step would update state of a parameter without elements here. In the
            # saved order of the state names, as a plain optimizer has them.
            if not member.is_absent:
                state_of[member.fqn] = {key: parts[key] for key in values}
    groups = aligned_groups(table, saved)
    names = [name for each in groups for name in each["params"]]
    keys: dict[str, Any] = {name: name if named else i for i, name in enumerate(names)}
    return {
        "state": {keys[name]: state_of[name] for name in names if name in state_of},
        "param_groups": [
            {**each, "params": [keys[name] for name in each["params"]]}
            for each in groups
        ],
    }


def _part(named: Named, name: str, value: Any) -> Any:
    """Return a copy of this rank's part. Collective: of a value of another plan."""
    # Of another plan, which is equal on all ranks: all gather, or none.
    if isinstance(value, ShardedValue) and unlike_part(named, value):
        value = value.full_tensor()
    part = part_for(named, name, value)
    # A view would keep the full tensor alive, and the optimizer would write into it.
    return part.clone() if isinstance(part, Tensor) else part


def _require_fit(
    optim: Any, table: Table, state: Mapping[str, Any], *, from_first: bool
) -> None:
    """Refuse values of another shape, and parts that no rank can use."""
    is_elementwise = not needs_whole_params(optim)
    for named in table.members:
        for name, value in state.get(named.fqn, {}).items():
            who = f"Optimizer state {name!r} of {quoted(named.fqn)}"
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            if shape not in ((), named.shape) and (is_elementwise or named.is_cut):
                raise CheckpointError(
                    f"{who} has shape {shape}; expected a scalar or the parameter's "
                    f"full shape {named.shape}. Pass what optim_state_dict(model, "
                    "optim) returned; optim.state_dict() of a sharded model is one "
                    "rank's."
                )
            problem = part_problem(named, value, from_first=from_first)
            if problem:
                raise CheckpointError(f"{who}: {problem}")


def _routes_of(
    units: Sequence[_FSDPState], group: dist.ProcessGroup | None
) -> tuple[Route, Route]:
    """Return the groups over which, in turn, all ranks exchange, and those of a send.

    A value goes along the replicate group of shard rank 0, and then from there over
    each shard group.
    """
    if group is not None or not units:
        given = () if group is None else (group,)
        return given, given
    shard, replicate = units[0].ranks.shard, units[0].ranks.replicate
    copies = replicate if shard.rank() == 0 else None
    both, sends = (
        tuple(g for g in each if g is not None and g.size() > 1)
        for each in ((shard, replicate), (copies, shard))
    )
    return both, sends


def _outline(saved: Any) -> Any:
    """Return a state dict without the states, which follow one by one."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return saved
    return {**saved, "state": {key: {} for key in saved["state"]}}


def _shared(value: Any, senders: Route) -> Any:
    """Return the first rank's value. Collective: a broadcast of an object per group.

    Raises: CheckpointError on all ranks, for what cannot be pickled.
    """
    is_first = all(group.rank() == 0 for group in senders)
    told: Any = None
    if senders and is_first:
        try:
            # A pickled CUDA tensor would be restored on the sender's device.
            told = pickle.dumps(_pytree.tree_map_only(Tensor, Tensor.cpu, value))
        except Exception as error:
            # Not raised: the other ranks wait for the broadcast.
            told = (
                "The optimizer state of the first rank cannot be sent to the others: "
                f"{type(error).__name__}: {error}. A state holds tensors, numbers, "
                "strings, lists and dicts; leave out what is none of them."
            )
    for group in senders:
        told = collectives.broadcast_object(told, group)
    if isinstance(told, str):
        raise CheckpointError(told)
    return value if is_first else pickle.loads(told)


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
    optim = made_over(model, optim, optim_input)
    return _to_load(model, optim, full_optim_state_dict, "shard_full_optim_state_dict")


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

    Collective, Raises: as ``optim_state_dict_to_load`` with ``rank0_only``.
    """
    saved, what = full_optim_state_dict, "scatter_full_optim_state_dict"
    optim = made_over(model, optim, optim_input)
    return _to_load(model, optim, saved, what, from_first=True, group=group)


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
    saved, what = sharded_optim_state_dict, "flatten_sharded_optim_state_dict"
    return _to_load(model, optim, saved, what)


def _current(
    model: nn.Module, optim: Optimizer, what: str, *, first_only: bool = False
) -> dict[str, Any]:
    """Return the optimizer's own state, after all ranks have called ``what``."""
    require_pair(model, optim, what)
    meet_for_state(_get_fsdp_states(model), what, first_only=first_only)
    return local_state_dict(optim)
