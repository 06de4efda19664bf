"""State values of a parameter as sharded values, and what ranks have to agree on.

An optimizer keeps no state for a parameter without elements on its rank. The first rank
that holds elements describes the state for those ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from composable_fsdp.comm.meeting import exchange, raise_on_all_ranks
from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError, DesyncError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.flat_state import Values, is_scalar
from composable_fsdp.optim.names import Named, shard_groups
from composable_fsdp.optim.step_checks import misfit_text
from composable_fsdp.state_dict.full import mismatch, sharded_value
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state


def sharded_values(
    members: Mapping[Any, Named],
    given: Mapping[Any, Any],
    groups: Sequence[dist.ProcessGroup],
    *,
    alone: bool,
    units: Sequence[_FSDPState] = (),
) -> dict[Any, Any]:
    """Return the state with sharded values; unless ``alone`` equal keys on all ranks.

    Collective: unless ``alone`` names; an error of a rank goes over ``groups``.
    """
    state = dict(given)
    with raise_on_all_ranks(groups):
        for key, named in members.items():
            # State of a parameter without elements on this rank is stale.
            if named.is_absent and is_empty(state.get(key, {})):
                state.pop(key, None)
            elif key in state:
                state[key] = _shown(named, state[key])
    if alone:
        return state
    states = [given.get(key, {}) for key in members]
    require_same_state(list(members.values()), states, units)
    for (key, named), values in zip(members.items(), states, strict=True):
        if named.is_absent and values:
            state[key] = _shown(named, values)
    # In the order of the parameters, so that ranks which loop over the state call
    # ``full_tensor`` in the same order.
    return {key: state[key] for key in (*members, *state) if key in state}


def _shown(named: Named, values: Values) -> Values:
    """Return state with this rank's parts as ``ShardedValue``; a whole one as it is."""
    if error := misfit(named, values):
        raise error
    return {
        name: sharded_value(named.ref, value)
        if named.ref is not None
        and isinstance(value, Tensor)
        and value.shape == named.parameter.shape
        else value
        for name, value in values.items()
    }


def is_empty(values: Any) -> bool:
    """Return whether a state has no tensor with elements, apart from scalars."""
    return isinstance(values, dict) and not any(
        isinstance(value, Tensor) and value.ndim and value.numel()
        for value in values.values()
    )


def forget_homes(state: Mapping[Any, Values]) -> None:
    """Have ``full_tensor`` refused, which would wait for ranks that lack the entry."""
    for value in (value for values in state.values() for value in values.values()):
        if isinstance(value, ShardedValue):
            value.home = None


def mark_partial(named: Named, values: Values) -> None:
    """Forbid pickling of sharded values if the unit's state dict type is full."""
    assert named.handle is not None
    unit = _get_module_fsdp_state(named.handle.layout.owners[0])
    kind = None if unit is None else unit.settings.state_dict.state_dict_type
    for key, value in values.items() if kind is StateDictType.FULL_STATE_DICT else ():
        if isinstance(value, ShardedValue) and value.is_partial:
            value.not_alone = f"state {key!r} of {quoted(named.fqn)}"


def part_problem(named: Named, value: Any, *, from_first: bool) -> str:
    """Return why ranks can neither take nor gather a sharded value; else empty."""
    if not isinstance(value, ShardedValue):
        return ""
    if from_first:
        return (
            "expected a whole tensor on the first rank, which gives it to all, got a "
            "ShardedValue. Load sharded values on every rank, with rank0_only=False."
        )
    known = value.home is not None and value.home.group is not None
    is_gathered = tuple(value.shape) == named.shape and (known or not value.is_partial)
    return "" if is_gathered else unlike_part(named, value)


def unlike_part(named: Named, value: ShardedValue) -> str:
    """Return why ``value`` is not this rank's part; empty if the value is."""
    if named.ref is None:
        return "expected a whole tensor, because the parameter is not sharded."
    return mismatch(named.ref, value)


def part_for(named: Named, key: str, value: Any) -> Any:
    """Return this rank's part of a sharded value, a full tensor or a part; no copy."""
    if isinstance(value, ShardedValue):
        problem = unlike_part(named, value)
        if problem:
            raise CheckpointError(
                f"Optimizer state {key!r} of {quoted(named.fqn)}: {problem}"
            )
        return value.local
    # First this rank's shape: if both are equal, this rank holds the whole parameter.
    if is_scalar(key, value, named.shape) or value.shape == named.parameter.shape:
        return value
    if named.ref is not None and tuple(value.shape) == named.shape:
        return named.ref.part_of(value)
    if not named.is_cut:
        # State that is not element-wise, of a parameter that this rank holds whole.
        return value
    raise CheckpointError(
        f"Optimizer state {key!r} of {quoted(named.fqn)} has shape "
        f"{tuple(value.shape)}; expected this rank's part, "
        f"{tuple(named.parameter.shape)}, the full shape, {named.shape}, or a scalar. "
        "Load what this rank saved under an equal plan, or what "
        "optim_state_dict_to_load(model, optim, state) returns."
    )


class _Entry(NamedTuple):
    """What a rank says of a parameter."""

    keys: list[str]
    """The sorted names of its element-wise states."""
    told: Values
    """The dtype or the scalar for ranks without elements; whether it was there."""


def require_same_state(
    members: list[Named], states: list[Values], units: Sequence[_FSDPState] = ()
) -> None:
    """Check on all ranks that state can be gathered; complete ``states``.

    Collective: one all-gather of objects per shard group; all its ranks must call.
    Raises: CheckpointError, DesyncError, on all ranks of the group.
    """
    # Sent with the entries and raised later, because the other ranks wait.
    problem = next(filter(None, map(misfit, members, states)), None)
    # The groups of ``units`` first, in an order equal on all ranks, also without a
    # parameter to describe.
    cut: dict[dist.ProcessGroup, dict[str, int]] = {g: {} for g in shard_groups(units)}
    # By name: the order of the parameters in the optimizer may differ between ranks.
    for i, named in sorted(enumerate(members), key=lambda pair: pair[1].fqn):
        if named.group is not None:
            cut.setdefault(named.group, {})[named.fqn] = i
    own = [
        {fqn: _entry(members[i], states[i]) for fqn, i in each.items()}
        for each in cut.values()
    ]
    # All exchanges before any error: a rank that raised would be missing in the next.
    outcomes = [exchange(problem, *pair) for pair in zip(own, cut, strict=True)]
    if problem is not None:
        raise problem
    failures = (each.failure for said in outcomes for each in said)
    failure = next(filter(None, failures), None)
    if failure is not None:
        raise failure.rebuilt()
    for mine, said, places in zip(own, outcomes, cut.values(), strict=True):
        told = [each.value for each in said]
        _require_same_names(mine, told)
        for fqn, i in places.items():
            _take(members[i], states, i, [each[fqn] for each in told])


def misfit(named: Named, values: Values) -> CheckpointError | None:
    """Return an error for state that is not element-wise; None without such state."""
    shape = named.parameter.shape
    for key, value in values.items() if named.is_cut else ():
        leaves = _pytree.tree_leaves(value)
        shapes = [tuple(v.shape) for v in leaves if isinstance(v, Tensor)]
        if any(shapes) and not (isinstance(value, Tensor) and value.shape == shape):
            who = f"Optimizer state {key!r} of {quoted(named.fqn)}"
            got = shapes[0] if isinstance(value, Tensor) else shapes
            return CheckpointError(misfit_text(who, got, named.parameter, named.shape))
    return None


def _entry(named: Named, values: Values) -> _Entry:
    """Return the entry that this rank sends for a parameter."""
    assert named.ref is not None
    keys = sorted(k for k, value in values.items() if not named.is_scalar(k, value))
    speaks = named.has_absent and named.ref.region.rank == named.holders[0]
    told: Values = {}
    for key, value in values.items() if speaks else ():
        if isinstance(value, Tensor) and value.ndim:
            told[key] = value.dtype
        elif isinstance(value, Tensor):
            told[key] = value.detach().cpu(), value.device.type == "cpu"
        else:
            # What cannot be sent is left out.
            with suppress(Exception):
                pickle.dumps(value)
                told[key] = value, True
    return _Entry(keys, told)


def _require_same_names(mine: dict[str, _Entry], told: list[Any]) -> None:
    """Refuse entries of a rank that are of other parameters than this rank's."""
    for rank, theirs in enumerate(told):
        for fqn in sorted(mine.keys() ^ theirs.keys()):
            raise _differing(fqn, "here", mine.get(fqn), rank, theirs.get(fqn))


def _take(
    named: Named, states: list[Values], i: int, entries: Sequence[_Entry]
) -> None:
    """Compare what ranks say of a parameter; take over state that this rank lacks."""
    assert named.ref is not None
    # Holders only, which the layout tells: state of other ranks may be stale.
    holders, own_rank = named.holders, named.ref.region.rank
    for rank in holders:
        if entries[rank].keys != entries[holders[0]].keys:
            first = f"on rank {holders[0]}", entries[holders[0]]
            raise _differing(named.fqn, *first, rank, entries[rank])
    if own_rank not in holders:
        # Also in place of state that an earlier load or step left here.
        states[i] = {}
        for key, told in entries[holders[0]].told.items():
            leaf = named.parameter
            if isinstance(told, torch.dtype):
                made = torch.empty(leaf.shape, dtype=told, device=leaf.device)
            else:
                made = told[0] if told[1] else told[0].to(leaf.device)
            states[i][key] = made


def _differing(
    fqn: str, where: str, one: _Entry | None, rank: int, other: _Entry | None
) -> DesyncError:
    """Return the error of ranks whose optimizers hold different state."""
    has, others = (None if each is None else each.keys for each in (one, other))
    return DesyncError(
        f"Optimizer state differs over ranks: {quoted(fqn)} has {has} {where} and "
        f"{others} on rank {rank} of the shard group. Build the optimizer with the "
        "same parameters on every rank, and step all of them."
    )
