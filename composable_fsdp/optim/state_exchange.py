"""Compare the optimizer state of all ranks before the state is gathered.

An optimizer keeps no state for a parameter without elements on its rank, because there
is no gradient to step on. The first rank that holds elements describes the state, and
ranks without elements take the description in the place of their own state::

    rank 0   bias [0, 2) of 3   exp_avg, step 7   says: exp_avg is float32, step is 7
    rank 1   bias [2, 3)        exp_avg, step 7   has to have the same names
    rank 2   no element         nothing           exp_avg (0,), step 7
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.consensus import exchange, first_failure
from composable_fsdp.errors import CheckpointError, DesyncError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import Named, shard_groups
from composable_fsdp.tree.state import _FSDPState

Values = dict[str, Any]


class _Elements(NamedTuple):
    """Description of an element-wise state."""

    dtype: torch.dtype


class _Number(NamedTuple):
    """Description of a state that is a 0-d tensor."""

    value: Tensor
    """A copy on the CPU."""
    is_on_cpu: bool


Entry = tuple[str, list[str], dict[str, Any]]
"""A parameter's name, the sorted names of its state tensors, and the description of its
state for ranks without elements (empty if not needed)."""


def require_same_state(
    members: list[Named],
    states: list[Values],
    units: Sequence[_FSDPState] = (),
) -> None:
    """Check on all ranks that state can be gathered; complete ``states``.

    Collective: one all-gather of objects per shard group; all its ranks must call.
    Raises: CheckpointError, for state that is not element-wise on some rank, and the
    error of a rank in ``raise_on_all_ranks``; DesyncError, if ranks have different
    state names. All on all ranks of the group.
    """
    # A rank that raised alone, or that has nothing to send, would leave the other ranks
    # waiting. So find the problem first, send it with the entries, and raise later.
    misfits = [_misfit(n, values) for n, values in zip(members, states, strict=True)]
    problem = next(filter(None, misfits), None)
    # Insert the groups of ``units`` first: all ranks must use the groups in the same
    # order, and must use a group even if this rank has no parameter to describe there.
    cut: dict[dist.ProcessGroup, list[int]]
    cut = {group: [] for group in shard_groups(units)}
    # By name: the order of the parameters in the optimizer may differ between ranks.
    for i, named in sorted(enumerate(members), key=lambda pair: pair[1].fqn):
        if named.handle is not None and named.handle.groups.shard is not None:
            cut.setdefault(named.handle.groups.shard, []).append(i)
    # Complete all exchanges before any error is raised: a rank that raised after the
    # first would be missing in the next.
    told = []
    for group, indices in cut.items():
        mine = [_entry(members[i], states[i]) for i in indices]
        told.append((indices, exchange(problem, mine, group)))
    if problem is not None:
        raise problem
    for _, outcomes in told:
        failure = first_failure(each.failure for each in outcomes)
        if failure is not None:
            raise failure.rebuilt()
    for indices, outcomes in told:
        answers = [each.value for each in outcomes]
        _take([members[i] for i in indices], states, indices, answers)


def _misfit(named: Named, values: Values) -> CheckpointError | None:
    """Return an error for state that is not element-wise; None without such state."""
    if not named.is_cut:
        return None
    for key, value in values.items():
        shape = named.parameter.shape
        if not named.is_scalar(key, value) and value.shape != shape:
            return CheckpointError(
                f"Optimizer state {key!r} of {quoted(named.fqn)} has shape "
                f"{tuple(value.shape)}; expected a scalar or the shape of this rank's "
                f"shard, {tuple(shape)}. State that is not "
                "element-wise, or made before fully_shard, cannot be put together from "
                "shards: use an element-wise optimizer, and make it hold state only "
                "after fully_shard."
            )
    return None


def _entry(named: Named, values: Values) -> Entry:
    """Return the entry that this rank sends for a parameter."""
    keys = sorted(k for k, value in values.items() if not named.is_scalar(k, value))
    return named.fqn, keys, _described(values) if named.speaks_for_absent else {}


def _described(values: Values) -> dict[str, Any]:
    """Describe the state ``values``, without elements, for ranks that hold none."""
    described: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            try:
                pickle.dumps(value)
            except Exception:
                # A value that does not pickle cannot be sent; leave it out.
                continue
            described[key] = value
        elif value.ndim:
            described[key] = _Elements(value.dtype)
        else:
            described[key] = _Number(value.detach().cpu(), value.device.type == "cpu")
    return described


def _made(told: Any, leaf: Tensor) -> Any:
    """Create the described state for ``leaf``, which has no elements."""
    if isinstance(told, _Elements):
        return torch.empty(leaf.shape, dtype=told.dtype, device=leaf.device)
    if isinstance(told, _Number):
        return told.value if told.is_on_cpu else told.value.to(leaf.device)
    return told


def _take(
    members: list[Named],
    states: list[Values],
    indices: list[int],
    answers: list[list[Entry]],
) -> None:
    """Compare the entries of a group's ranks; take over states that this rank lacks.

    Raises: DesyncError, on all ranks of the group.
    """
    fqns = [named.fqn for named in members]
    for rank, entries in enumerate(answers):
        if [*map(itemgetter(0), entries)] != fqns:
            own = [_entry(members[at], states[i]) for at, i in enumerate(indices)]
            nothing: Any = ("nothing more", [])
            pairs = zip_longest(own, entries, fillvalue=nothing)
            mine, theirs = next(pair for pair in pairs if pair[0][0] != pair[1][0])
            there = f"on rank {rank} of the shard group"
            raise _differing("here", mine, there, theirs)
    for at, (named, i) in enumerate(zip(members, indices, strict=True)):
        assert named.ref is not None
        # The layout, which is equal on all ranks, says which ranks hold elements.
        # Compare only these: state of other ranks may be stale.
        holders, own_rank = named.holders, named.ref.region.rank
        keys = {rank: answers[rank][at][1] for rank in holders}
        first = holders[0]
        other = next((rank for rank in holders if keys[rank] != keys[first]), None)
        if other is not None:
            here = own_rank if own_rank in keys else first
            other = next(rank for rank in holders if keys[rank] != keys[here])
            where = {each: f"on rank {each} of the shard group" for each in holders}
            where[own_rank] = "here"
            pair = (named.fqn, keys[here]), (named.fqn, keys[other])
            raise _differing(where[here], pair[0], where[other], pair[1])
        if own_rank not in keys:
            # The description also replaces state that an earlier load or step left on
            # this rank.
            described = answers[first][at][2]
            states[i] = {k: _made(v, named.parameter) for k, v in described.items()}


def _differing(
    here: str, mine: Sequence[Any], there: str, theirs: Sequence[Any]
) -> DesyncError:
    """Return the error of ranks whose optimizers hold different state."""
    return DesyncError(
        f"Optimizer state differs over ranks: {here} {quoted(mine[0])} has {mine[1]}, "
        f"{there} {quoted(theirs[0])} has {theirs[1]}. Build the optimizer with the "
        "same parameters on every rank, and step all of them."
    )
