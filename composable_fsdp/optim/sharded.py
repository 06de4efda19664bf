"""State values of a parameter as sharded values, and what ranks have to agree on.

An optimizer keeps no state for a parameter without elements on its rank. The first rank
that holds elements describes the state for those ranks::

    rank 0   bias [0, 2) of 3   exp_avg, step 7   says: exp_avg is float32, step is 7
    rank 1   bias [2, 3)        exp_avg, step 7   has to have the same names
    rank 2   no element         nothing           exp_avg (0,), step 7
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from composable_fsdp.comm.meeting import exchange
from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError, DesyncError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.optim.flat_state import is_scalar
from composable_fsdp.optim.names import Named, shard_groups
from composable_fsdp.optim.step_checks import misfit_text
from composable_fsdp.state_dict.full import mismatch, sharded_value
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state


def as_sharded(named: Named, value: Any) -> Any:
    """Return this rank's ``value`` as a ``ShardedValue``; scalars stay as they are."""
    is_part = isinstance(value, Tensor) and value.shape == named.parameter.shape
    # Of a parameter that this rank holds whole, state may have any shape.
    return sharded_value(named.ref, value) if named.ref and is_part else value


def mark_partial(handle: FlatParamHandle, values: dict[str, Any], name: str) -> None:
    """Forbid pickling of sharded values if the unit's state dict type is full."""
    unit = _get_module_fsdp_state(handle.layout.owners[0])
    kind = None if unit is None else unit.settings.state_dict.state_dict_type
    for key, value in values.items() if kind is StateDictType.FULL_STATE_DICT else ():
        if isinstance(value, ShardedValue) and value.is_partial:
            value.not_alone = f"state {key!r} of {name}"


def part_problem(named: Named, value: Any, *, from_first: bool) -> str:
    """Return why ranks can neither take nor gather a sharded value; else empty."""
    if type(value).__name__ == "ShardedTensor":
        return (
            "expected a tensor or a ShardedValue, got a ShardedTensor of torch's older "
            "reader. Read the checkpoint by torch.distributed.checkpoint.load into "
            "what optim_state_dict(model, optim) returns."
        )
    # ``part``: a ``Described`` stands for the first rank's sharded value.
    if not isinstance(value, ShardedValue) and not getattr(value, "part", False):
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


Values = dict[str, Any]


class _Entry(NamedTuple):
    """What a rank says of a parameter."""

    fqn: str
    keys: list[str]
    """The sorted names of its element-wise states."""
    told: Values
    """The state for ranks without elements, if this rank describes it: a dtype, or of a
    scalar the value, on the CPU, and whether it was there."""


def require_same_state(
    members: list[Named], states: list[Values], units: Sequence[_FSDPState] = ()
) -> None:
    """Check on all ranks that state can be gathered; complete ``states``.

    Collective: one all-gather of objects per shard group; all its ranks must call.
    Raises, on all ranks of the group: CheckpointError, for state that is not
    element-wise on some rank, and the error of a rank in ``raise_on_all_ranks``;
    DesyncError, if ranks have different state names.
    """
    # Sent with the entries and raised later, because the other ranks wait.
    problem = next(filter(None, map(misfit, members, states)), None)
    # The groups of ``units`` first, in an order equal on all ranks, also without a
    # parameter to describe.
    cut: dict[dist.ProcessGroup, list[int]] = {g: [] for g in shard_groups(units)}
    # By name: the order of the parameters in the optimizer may differ between ranks.
    for i, named in sorted(enumerate(members), key=lambda pair: pair[1].fqn):
        if named.group is not None:
            cut.setdefault(named.group, []).append(i)
    own = [[_entry(members[i], states[i]) for i in each] for each in cut.values()]
    # All exchanges before any error: a rank that raised would be missing in the next.
    outcomes = [exchange(problem, *pair) for pair in zip(own, cut, strict=True)]
    if problem is not None:
        raise problem
    failures = (each.failure for said in outcomes for each in said)
    failure = next(filter(None, failures), None)
    if failure is not None:
        raise failure.rebuilt()
    for mine, said, numbers in zip(own, outcomes, cut.values(), strict=True):
        for rank, each in enumerate(said):
            _require_same_names(mine, each.value, rank)
        for i, *entries in zip(numbers, *(each.value for each in said), strict=True):
            _take(members[i], states, i, entries)


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
    return _Entry(named.fqn, keys, told)


def _made(told: Any, leaf: Tensor) -> Any:
    """Create the described state for ``leaf``, which has no elements."""
    if isinstance(told, torch.dtype):
        return torch.empty(leaf.shape, dtype=told, device=leaf.device)
    value, is_on_cpu = told
    return value if is_on_cpu else value.to(leaf.device)


def _require_same_names(own: list[_Entry], theirs: list[_Entry], rank: int) -> None:
    """Refuse the entries of a rank that are of other parameters than this rank's."""
    nothing = _Entry("nothing more", [], {})
    for mine, other in zip_longest(own, theirs, fillvalue=nothing):
        if mine.fqn != other.fqn:
            raise _differing("here", mine, f"on rank {rank} of the shard group", other)


def _take(
    named: Named, states: list[Values], i: int, entries: Sequence[_Entry]
) -> None:
    """Compare what ranks say of a parameter; take over state that this rank lacks."""
    assert named.ref is not None
    # Holders only, which the layout tells: state of other ranks may be stale.
    holders, own_rank = named.holders, named.ref.region.rank
    here = own_rank if own_rank in holders else holders[0]
    for rank in holders:
        if entries[rank].keys != entries[here].keys:
            where, there = (f"on rank {r} of the shard group" for r in (here, rank))
            where = "here" if here == own_rank else where
            raise _differing(where, entries[here], there, entries[rank])
    if here != own_rank:
        # Also in place of state that an earlier load or step left here.
        told = entries[here].told.items()
        states[i] = {key: _made(each, named.parameter) for key, each in told}


def _differing(here: str, mine: _Entry, there: str, theirs: _Entry) -> DesyncError:
    """Return the error of ranks whose optimizers hold different state."""
    return DesyncError(
        f"Optimizer state differs over ranks: {here} {quoted(mine.fqn)} has "
        f"{mine.keys}, {there} {quoted(theirs.fqn)} has {theirs.keys}. Build the "
        "optimizer with the same parameters on every rank, and step all of them."
    )
