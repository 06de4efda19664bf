"""Load optimizer state: cut a plain model's state into this rank's shards."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from composable_fsdp.access.gather import gather_slot
from composable_fsdp.access.other_parts import Route, refuse_forms
from composable_fsdp.access.single import find_parameter, unit_of
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call, meet, require_success_on_all_ranks
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from composable_fsdp.errors import CheckpointError, CompositionError
from composable_fsdp.flat.param_ref import ParamRef
from composable_fsdp.naming import did_you_mean, listed, quoted, takes_optimizer
from composable_fsdp.optim.flat_state import OriginalView, originals
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
from composable_fsdp.optim.save import optim_state_dict
from composable_fsdp.optim.sharded import (
    part_for,
    part_problem,
    require_same_state,
    unlike_part,
)
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import needs_whole_params, require_elementwise
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.settings import get_state_dict_type, state_dict_type
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
    ranks: Route = ()
    senders: Route = ()
    if from_first:
        ranks, senders = _routes_of(units, group)
        # The first rank sends over the data ranks alone.
        refuse_forms([unit.handle for unit in units], f"{what} with rank0_only")
        # Only the call is compared, because the state is the first rank's.
        meet(ranks, Call(what, details=("rank0_only=True",)))
    is_first = all(each.rank() == 0 for each in senders)
    given = saved if is_first else None
    outline = _shared(_outline(given), senders)
    with require_success_on_all_ranks(ranks):
        for state in units:
            require_between_steps(state, what)
        table = name_parameters(model, optim.param_groups, given_names(optim))
        saved = state_by_name(given if is_first else outline, table, what)
        # Before the first tensor is gathered or sent.
        _require_fit(optim, table, saved["state"], from_first=bool(senders))
    # No rank sends, so only meetings tell that a rank loads alone.
    if not local and not from_first:
        meet_for_state(units, what, replicas=True)
    state_of = _own_state(table.members, saved["state"], senders)
    groups = aligned_groups(table, saved)
    names = [name for each in groups for name in each["params"]]
    keys: dict[str, Any] = {name: name if named else i for i, name in enumerate(names)}
    for each in groups:
        each["params"] = [keys[name] for name in each["params"]]
    return {
        "state": {keys[name]: state_of[name] for name in names if name in state_of},
        "param_groups": groups,
    }


def _own_state(
    members: list[Named], saved: Mapping[str, Mapping[str, Any]], senders: Route
) -> dict[str, dict[str, Any]]:
    """Return copies of this rank's state by name. Collective: as ``_shared``."""
    found = {}
    # By name: the order of parameters may differ between ranks.
    for member in sorted(members, key=attrgetter("fqn")):
        if member.fqn in saved:
            values = _shared(saved[member.fqn], senders)
            parts = {key: _part(member, key, values[key]) for key in sorted(values)}
            # No step would update state of a parameter without elements here. In the
            # saved order of the state names, as a plain optimizer has them.
            if not member.is_absent:
                found[member.fqn] = {key: parts[key] for key in values}
    return found


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
    """Return the groups over which, in turn, all ranks exchange, and a send's."""
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
    """Return the first rank's value; CheckpointError on all, if it cannot be sent."""
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
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return optim_state_dict(model, optim)


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

    ``group``: the ranks that take part; default: the ranks of the model.
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
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT, None, config):
        return optim_state_dict(model, optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return a state dict to load, of a state in sharded values.

    Collective, Raises: as ``optim_state_dict_to_load``.
    """
    saved, what = sharded_optim_state_dict, "flatten_sharded_optim_state_dict"
    return _to_load(model, optim, saved, what)


# State of a single parameter, which a flat parameter may have joined.


@takes_optimizer
def get_full_optim_state(
    model: nn.Module, optim: Optimizer, fqn: str
) -> dict[str, Any]:
    """Return the state that ``optim`` keeps for a parameter, in full shapes.

    ``fqn`` is its name in the plain model. The result, ``{name: value}``, has new
    tensors on the compute device; it is ``{}`` before the first step, and for a
    parameter that never had a gradient.

    Collective: one exchange of state names, and per state one broadcast from each rank
    that holds elements, over the shard group; all its ranks must call. None, if the
    parameter is not sharded.
    Raises: CompositionError, for a name that ``model`` or ``optim`` does not have, and
    for an optimizer that needs whole parameters; CheckpointError, DesyncError,
    PhaseError and TypeError, as ``optim_state_dict``.

    >>> get_full_optim_state(model, optim, "head.weight")["exp_avg"]
    """
    named = _find(model, optim, fqn, "get_full_optim_state")
    states = [OriginalView(optim).state_of(named.parameter)]
    if named.ref is not None:
        require_same_state([named], states)
    result = dict(states[0])
    # By name, because each state needs broadcasts, in the same order on all ranks.
    for key, value in sorted(result.items()):
        if named.ref is not None and named.is_cut and not named.is_scalar(key, value):
            value = gather_slot(named.ref, value)
        result[key] = value.detach().clone() if isinstance(value, Tensor) else value
    return result


@takes_optimizer
@torch.no_grad()
def set_full_optim_state(
    model: nn.Module, optim: Optimizer, fqn: str, state: dict[str, Any]
) -> None:
    """Write optimizer state of a parameter from full values.

    Each rank passes the same ``{name: value}``, tensors in the parameter's full shape
    or scalars, and writes its part. State names that are left out keep their values.

    Raises: as ``get_full_optim_state``; CheckpointError, for another shape or for a
    name that the optimizer does not keep, before anything is written. A rank without
    any state cannot check names.
    """
    named = _find(model, optim, fqn, "set_full_optim_state")
    view = OriginalView(optim)
    own: Any = view.state_of(named.parameter)
    known = {key for values in optim.state.values() for key in values}
    parts = {}
    for key, value in state.items():
        if known and key not in known:
            raise CheckpointError(
                f"set_full_optim_state: {type(optim).__name__} keeps no {key!r} for "
                f"{quoted(fqn)}{did_you_mean(key, known)}. It keeps {listed(known)}."
            )
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if shape not in ((), named.shape):
            raise CheckpointError(
                f"set_full_optim_state expects {key!r} of {quoted(fqn)} as a scalar or "
                f"in the parameter's full shape {named.shape}, got {shape}."
            )
        parts[key] = _replacing(named, key, value, own.get(key))
    if not named.is_absent:
        view.write(named.parameter, parts)


def _replacing(named: Named, key: str, value: Any, before: Any) -> Any:
    """Return a copy of this rank's part of a full value, in place of ``before``."""
    if not isinstance(value, Tensor):
        return value
    # For a 0-d parameter the optimizer's own state tells.
    if value.ndim or before is None or not named.is_scalar(key, before):
        value = part_for(named, key, value)
    # Optimizers keep ``step`` on the CPU.
    if isinstance(before, Tensor):
        value = value.to(before.device, before.dtype)
    elif not named.is_scalar(key, value):
        value = value.to(named.parameter.device)
    return value.detach().clone()


def _find(model: nn.Module, optim: Optimizer, fqn: str, what: str) -> Named:
    """Find the parameter by name and check that ``optim`` holds the parameter."""
    require_pair(model, optim, what)
    found = find_parameter(model, fqn, what)
    ref = found if isinstance(found, ParamRef) else None
    named = Named(fqn, found.leaf if isinstance(found, ParamRef) else found, ref)
    units = [] if ref is None else [unit_of(ref)]
    # Reading sends over the shard group; writing must be the same in replicas.
    meet_for_state(units, what, repr(fqn), replicas=what.startswith("set"))
    install_optimizer_hooks(optim)
    require_elementwise(optim)
    held = [p for group in originals(optim.param_groups) for p in group["params"]]
    if all(p is not named.parameter for p in held):
        raise CompositionError(
            f"{what}: parameter {quoted(fqn)} is not in the {type(optim).__name__}. "
            "Pass the optimizer that trains it."
        )
    return named
