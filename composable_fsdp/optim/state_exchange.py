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
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from composable_fsdp.comm.consensus import exchange, first_failure
from composable_fsdp.errors import CheckpointError, DesyncError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import Named, shard_groups
from composable_fsdp.optim.step_checks import misfit_text
from composable_fsdp.tree.state import _FSDPState

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
    failure = first_failure(each.failure for said in outcomes for each in said)
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
