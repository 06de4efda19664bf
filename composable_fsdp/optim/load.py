"""From the plain model's optimizer state to what ``load_state_dict`` takes here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from composable_fsdp.optim.consensus import require_success_on_all_ranks, units_known
from composable_fsdp.optim.flat_state import flatten_state, originals
from composable_fsdp.optim.keys import aligned_groups, state_by_name
from composable_fsdp.optim.local_state import local_part, require_plans
from composable_fsdp.optim.names import (
    Group,
    Named,
    Optimizers,
    given_names,
    name_parameters,
    require_pairs,
)
from composable_fsdp.optim.sharded import is_number, own_part, require_own_parts
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import needs_whole_params, require_elementwise
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.full import part_of
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

    Args:
        model: the sharded model, or a module that holds it.
        optim: the optimizer that will load the result; or a list of several, which
            together have the parameters of the state: the result is a list, too.
        optim_state_dict: what ``optim_state_dict`` returned, at any world size, or a
            plain model's state, by names or by numbers (positions in the groups of
            ``optim``); full on every rank, unless ``set_state_dict_type`` says
            ``rank0_only`` (then the first rank's is sent to all) or local (then this
            rank's own). Sharded values are taken wherever full tensors are, if they
            are of this plan.
        is_named_optimizer: keep names as keys instead of the optimizer's ids.
        load_directly: also call ``optim.load_state_dict`` with the result.
        group: the ranks that the first one sends to, if not the model's.

    Collective: none; with ``rank0_only`` one broadcast of the structure, one exchange
    of what ranks refuse, and one broadcast per tensor.
    A parameter that no unit cuts may be missing from the state, and then has none.
    Raises: CheckpointError, listing names that are missing, left over, or of another
    shape; CompositionError, as ``optim_state_dict``; nothing has been loaded then.
    What ``load_state_dict`` of one of several optimizers refuses is told when those
    before it have loaded.
    """
    units = units_known(model, optim)
    settings = units[0].state_dict_settings if units else FULL_BY_DEFAULT
    config = settings.optim_state_dict_config

    is_list = isinstance(optim, (list, tuple))
    optims: Any = optim if is_list else [optim]

    def param_groups() -> list[list[Group]]:
        require_pairs(model, optim, "optim_state_dict_to_load")
        for each in optims:
            require_elementwise(each)
        if units:
            get_state_dict_type(model)  # one for all of them
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
) -> list[dict[str, Any]]:
    """Cut this rank's parts out of ``saved``; see ``optim_state_dict_to_load``.

    ``param_groups`` gives those of each optimizer, or raises: for all ranks, if they
    would wait. ``elementwise`` is about each. ``units`` are those of ``model``;
    ``given`` are names of parameters by ``id``, for those it does not hold.
    """
    senders = broadcast_groups(units, group) if from_first else ()
    shared = share_structure(saved, senders)
    with require_success_on_all_ranks(
        ranks_of_broadcast(units, group) if from_first else ()
    ):
        saved = unpacked(shared)
        groups_of = param_groups()
        require_module(model, "optim_state_dict_to_load")
        for state in units:
            require_between_steps(state, "optim_state_dict_to_load")
        own = [each for mine in groups_of for each in originals(mine)]
        groups = name_parameters(model, own, given)
        sizes = [len(mine) for mine in groups_of]
        saved = state_by_name(saved, model, groups, own, "optim_state_dict_to_load")
        if local:
            require_plans(model, saved)
        else:
            for mine, each in zip(_split(groups, sizes), elementwise, strict=True):
                _require_shapes(chain(*mine), saved, elementwise=each)
            require_own_parts(list(chain(*groups)), saved, from_first=bool(senders))
    state_of = {}
    # By name: the first rank may have sent them, and orders may differ.
    for member in sorted(chain(*groups), key=attrgetter("fqn")):
        values = saved["state"].get(member.fqn)
        if values is not None:
            parts = {
                name: local_part(member, name, values[name])
                if local
                else _part(member, name, values[name], senders)
                for name in sorted(values)
            }
            # In the order in which they were saved, as a plain optimizer loads them.
            # No step would bring up to date what a rank without elements had.
            if not member.is_absent:
                state_of[member.fqn] = {name: parts[name] for name in values}
    options = _split(aligned_groups(groups, saved, own), sizes)
    chosen = [_chosen(state_of, each, named=named) for each in options]
    return chosen if named else list(map(flatten_state, groups_of, chosen))


def _split(items: list[T], sizes: list[int]) -> list[list[T]]:
    """``items`` in consecutive lists of these sizes."""
    rest = iter(items)
    return [list(islice(rest, size)) for size in sizes]


def _chosen(
    state_of: dict[str, dict[str, Any]], groups: list[Group], *, named: bool
) -> dict[str, Any]:
    """The state of the parameters in ``groups``, by names or counted from zero."""
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
    """Refuse what is no scalar and not of a parameter's shape, on all ranks alike.

    Not for an optimizer that has other state, of parameters that are whole here.
    """
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
    """This rank's part of one state value; scalars are the same on every rank."""
    if isinstance(value, ShardedValue):
        return own_part(named, value).clone()
    if not isinstance(value, (Tensor, Described)):
        return value
    if senders and value.shape:
        value = share_tensor(value, senders, _device(named))
    assert isinstance(value, Tensor)
    if is_number(named, name, value):
        return value.clone()
    if not named.is_cut or named.region is None or named.slot is None:
        return value.clone()
    return part_of(named.region, named.slot, value, like=named.parameter).clone()


def _device(named: Named) -> torch.device:
    return named.parameter.device if named.handle is None else named.handle.device
