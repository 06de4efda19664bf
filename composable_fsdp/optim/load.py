"""Load optimizer state: cut a plain model's state into this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.other_parts import refuse_forms
from composable_fsdp.comm.consensus import require_success_on_all_ranks
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    StateDictType,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.broadcast_state import (
    Described,
    broadcast_groups,
    ranks_of_broadcast,
    share_structure,
    share_tensor,
    unpacked,
)
from composable_fsdp.optim.experts import refuse_experts, without_other_experts
from composable_fsdp.optim.flat_state import flatten_state, originals
from composable_fsdp.optim.keys import aligned_groups, state_by_name
from composable_fsdp.optim.names import (
    Group,
    Named,
    Optimizers,
    given_names,
    meet_for_state,
    name_parameters,
    require_pairs,
    units_known,
)
from composable_fsdp.optim.sharded import (
    is_of_chunks,
    own_part,
    part_for,
    require_own_parts,
    whole_of_chunks,
)
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import needs_whole_params, require_elementwise
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.other_experts import expert_units
from composable_fsdp.state_dict.settings import get_state_dict_type
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import require_module

T = TypeVar("T")


@overload
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]: ...


@overload
def optim_state_dict_to_load(
    model: nn.Module,
    optim: Sequence[torch.optim.Optimizer],
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> list[dict[str, Any]]: ...


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
    shape; CompositionError, as ``optim_state_dict``. No optimizer has loaded anything
    then. An error in ``load_state_dict`` of an optimizer of a list is raised after the
    optimizers before it in the list have loaded.
    """
    units = units_known(model, optim)
    settings = units[0].settings.state_dict if units else FULL_BY_DEFAULT
    config = settings.optim_state_dict_config

    is_list = isinstance(optim, (list, tuple))
    optims: Any = optim if is_list else [optim]

    # ``param_groups`` is a function, because ``state_to_load`` has to run these checks
    # inside the block that raises on all ranks.
    def param_groups() -> list[list[Group]]:
        require_pairs(model, optim, "optim_state_dict_to_load")
        for each in optims:
            require_elementwise(each)
        if units:
            # This call is only a check: the function raises if units differ in their
            # settings.
            get_state_dict_type(model)
        # The optimizer may get state here before its first step, and ``state_dict()``
        # must show that state as sharded values, too.
        for each in optims:
            install_optimizer_hooks(each)
        return [each.param_groups for each in optims]

    results = state_to_load(
        units,
        model,
        param_groups,
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
    return results if is_list else results[0]


def state_to_load(
    units: Sequence[_FSDPState],
    model: nn.Module,
    param_groups: Callable[[], list[list[Group]]],
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
    """Cut this rank's parts out of ``saved``; see ``optim_state_dict_to_load``.

    Collective: none; with ``from_first`` as ``optim_state_dict_to_load``.
    Raises: as ``optim_state_dict_to_load``.
    """
    handles = [unit.handle for unit in units]
    # No rank sends, so only a meeting tells that a rank loads alone.
    meets = not local and not from_first
    if meets and expert_units(handles):
        meet_for_state(units, what, replicas=True)
        saved = without_other_experts(saved, model, handles)
    # The structure is sent first, so that all ranks run the same checks before the
    # first tensor is sent. A rank that raised alone would leave the others in a
    # broadcast.
    ranks = ranks_of_broadcast(units, group) if from_first else ()
    senders = broadcast_groups(units, group) if from_first else ()
    # The first rank's state is sent, so only the call itself is compared.
    if from_first:
        meet(ranks, Call(what, details=("rank0_only=True",)))
    shared = share_structure(saved, senders)
    with require_success_on_all_ranks(ranks):
        saved = unpacked(shared)
        groups_of = param_groups()
        # The first rank sends over the data ranks alone.
        if from_first:
            refuse_forms(handles, f"{what} with rank0_only")
            refuse_experts(handles, what)
        require_module(model, "optim_state_dict_to_load")
        for state in units:
            require_between_steps(state, "optim_state_dict_to_load")
        own = [each for mine in groups_of for each in originals(mine)]
        groups = name_parameters(model, own, given)
        sizes = list(map(len, groups_of))
        saved = state_by_name(saved, model, groups, own, "optim_state_dict_to_load")
        for mine, each in zip(_split(groups, sizes), elementwise, strict=True):
            _require_shapes(chain(*mine), saved, elementwise=each)
        # Refuse here, before the loop below gathers or broadcasts the first tensor.
        require_own_parts(list(chain(*groups)), saved, from_first=bool(senders))
    if meets:
        meet_for_state(units, what, replicas=True)
    state_of = _own_state(chain(*groups), saved["state"], senders)
    # ``groups`` are the groups of all optimizers; return them to their optimizers.
    options = _split(aligned_groups(groups, saved, own), sizes)
    chosen = [_chosen(state_of, each, named=named) for each in options]
    # A state keyed by names stays per original, because flat parameters have no names.
    return chosen if named else list(map(flatten_state, groups_of, chosen))


def _own_state(
    members: Iterable[Named],
    saved: Mapping[str, Mapping[str, Any]],
    senders: tuple[dist.ProcessGroup, ...],
) -> dict[str, dict[str, Any]]:
    """Return the state of this rank by the name of the parameter.

    Collective: those of ``_part``, in the same order on all ranks.
    """
    found = {}
    # Sort by name: each tensor of the first rank is one broadcast, and the order of the
    # parameters in the optimizers may differ between ranks.
    for member in sorted(members, key=attrgetter("fqn")):
        values = saved.get(member.fqn)
        if values is None:
            continue
        parts = {
            name: _part(member, name, values[name], senders) for name in sorted(values)
        }
        # Keep the saved order of the state names, as a plain optimizer does. Skip
        # parameters without elements on this rank: no step would update their state
        # here, so the state would become stale.
        if not member.is_absent:
            found[member.fqn] = {name: parts[name] for name in values}
    return found


def _split(items: list[T], sizes: list[int]) -> list[list[T]]:
    """Cut ``items`` into consecutive lists of the given sizes."""
    rest = iter(items)
    return [list(islice(rest, size)) for size in sizes]


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


def _require_shapes(
    members: Iterable[Named], saved: dict[str, Any], *, elementwise: bool
) -> None:
    """Refuse tensors that are neither scalars nor of the parameter's full shape."""
    for named in members:
        if not elementwise and not named.is_cut:
            continue
        for name, value in saved["state"].get(named.fqn, {}).items():
            if not isinstance(value, (Tensor, Described)):
                continue
            shape = tuple(value.shape)
            if shape not in ((), named.shape):
                raise CheckpointError(
                    f"Optimizer state {name!r} of {quoted(named.fqn)} has shape "
                    f"{shape}; expected a scalar or the parameter's full shape "
                    f"{named.shape}. Pass what optim_state_dict(model, optim) "
                    "returned; optim.state_dict() of a sharded model is one rank's."
                )


def _part(
    named: Named, name: str, value: Any, senders: tuple[dist.ProcessGroup, ...]
) -> Any:
    """Return this rank's part of a state value; scalars are equal on all ranks.

    Collective: none; one broadcast per group of ``senders`` for a tensor with
    dimensions.
    """
    if isinstance(value, ShardedValue):
        value = own_part(named, value)
    elif is_of_chunks(value):
        value = whole_of_chunks(value, _device(named))
    elif senders and isinstance(value, (Tensor, Described)) and value.shape:
        # Scalars were sent with the structure; see ``unpacked``.
        value = share_tensor(value, senders, _device(named))
    part = part_for(named, name, value)
    # Clone the part: a view would keep the full tensor alive, and the optimizer would
    # write into the memory of the state dict.
    return part.clone() if isinstance(part, Tensor) else part


def _device(named: Named) -> torch.device:
    """Return the device on which this rank receives a tensor of the first rank."""
    return (
        named.parameter.device if named.handle is None else named.handle.layout.device
    )
