"""Compare the optimizer state of all ranks before the state is gathered.

An optimizer keeps no state for a parameter without elements on its rank. The first rank
that holds elements describes the state for those ranks::

    rank 0   bias [0, 2) of 3   exp_avg, step 7   says: exp_avg is float32, step is 7
    rank 1   bias [2, 3)        exp_avg, step 7   has to have the same names
    rank 2   no element         nothing           exp_avg (0,), step 7
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.consensus import exchange, first_failure
from composable_fsdp.errors import CheckpointError, DesyncError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import Named, shard_groups
from composable_fsdp.optim.step_checks import misfit_text
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


class _Entry(NamedTuple):
    """What a rank says of a parameter."""

    fqn: str
    keys: list[str]
    """The sorted names of its element-wise states."""
    described: Values
    """The state for ranks without elements; empty if there are none."""


def require_same_state(
    members: list[Named],
    states: list[Values],
    units: Sequence[_FSDPState] = (),
) -> None:
    """Check on all ranks that state can be gathered; complete ``states``.

    Collective: one all-gather of objects per shard group; all its ranks must call.
    Raises, on all ranks of the group: CheckpointError, for state that is not
    element-wise on some rank, and the error of a rank in ``raise_on_all_ranks``;
    DesyncError, if ranks have different state names.
    """
    # Sent with the entries and raised later, because the other ranks wait.
    misfits = [_misfit(n, values) for n, values in zip(members, states, strict=True)]
    problem = next(filter(None, misfits), None)
    # The groups of ``units`` first, in an order equal on all ranks, also without a
    # parameter to describe.
    cut: dict[dist.ProcessGroup, list[int]]
    cut = {group: [] for group in shard_groups(units)}
    # By name: the order of the parameters in the optimizer may differ between ranks.
    for i, named in sorted(enumerate(members), key=lambda pair: pair[1].fqn):
        if named.handle is not None and named.handle.groups.shard is not None:
            cut.setdefault(named.handle.groups.shard, []).append(i)
    # All exchanges before any error: a rank that raised would be missing in the next.
    told = [
        # Plain tuples, because the name of a class takes more bytes than the entry.
        exchange(problem, [(*_entry(members[i], states[i]),) for i in indices], group)
        for group, indices in cut.items()
    ]
    if problem is not None:
        raise problem
    for outcomes in told:
        failure = first_failure(each.failure for each in outcomes)
        if failure is not None:
            raise failure.rebuilt()
    for indices, outcomes in zip(cut.values(), told, strict=True):
        answers = [[_Entry(*entry) for entry in each.value] for each in outcomes]
        _take(members, states, indices, answers)


def _misfit(named: Named, values: Values) -> CheckpointError | None:
    """Return an error for state that is not element-wise; None without such state."""
    shape = named.parameter.shape
    for key, value in values.items() if named.is_cut else ():
        if not named.is_scalar(key, value) and value.shape != shape:
            who = f"Optimizer state {key!r} of {quoted(named.fqn)}"
            got = tuple(value.shape)
            return CheckpointError(misfit_text(who, got, named.parameter, named.shape))
    return None


def _entry(named: Named, values: Values) -> _Entry:
    """Return the entry that this rank sends for a parameter."""
    assert named.ref is not None
    keys = sorted(k for k, value in values.items() if not named.is_scalar(k, value))
    speaks = named.has_absent and named.ref.region.rank == named.holders[0]
    return _Entry(named.fqn, keys, _described(values) if speaks else {})


def _described(values: Values) -> Values:
    """Describe the state ``values``, without elements, for ranks that hold none."""
    described: Values = {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            try:
                pickle.dumps(value)
            except Exception:
                # It cannot be sent; leave it out.
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
    answers: list[list[_Entry]],
) -> None:
    """Compare the entries of a group's ranks; take over states that this rank lacks."""
    own = [_entry(members[i], states[i]) for i in indices]
    name_of = attrgetter("fqn")
    for rank, entries in enumerate(answers):
        if list(map(name_of, entries)) != list(map(name_of, own)):
            pairs = zip_longest(own, entries, fillvalue=_Entry("nothing more", [], {}))
            mine, theirs = next(pair for pair in pairs if pair[0].fqn != pair[1].fqn)
            raise _differing("here", mine, f"on rank {rank} of the shard group", theirs)
    for at, i in enumerate(indices):
        named = members[i]
        assert named.ref is not None
        # Holders only, which the layout tells: state of other ranks may be stale.
        holders, own_rank = named.holders, named.ref.region.rank
        said = {rank: answers[rank][at] for rank in holders}
        here = own_rank if own_rank in said else holders[0]
        keys = said[here].keys
        other = next((rank for rank in holders if said[rank].keys != keys), None)
        if other is not None:
            where = "here" if here == own_rank else f"on rank {here} of the shard group"
            there = f"on rank {other} of the shard group"
            raise _differing(where, said[here], there, said[other])
        if own_rank not in said:
            # Also in place of state that an earlier load or step left here.
            described = said[here].described
            states[i] = {k: _made(v, named.parameter) for k, v in described.items()}


def _differing(here: str, mine: _Entry, there: str, theirs: _Entry) -> DesyncError:
    """Return the error of ranks whose optimizers hold different state."""
    return DesyncError(
        f"Optimizer state differs over ranks: {here} {quoted(mine.fqn)} has "
        f"{mine.keys}, {there} {quoted(theirs.fqn)} has {theirs.keys}. Build the "
        "optimizer with the same parameters on every rank, and step all of them."
    )
