"""What ranks tell each other of an optimizer's state before they put it together.

An optimizer has no state for a parameter of which its rank holds no element: there is
no gradient to step on. So the first rank that holds some says what the state is, and
the others take that, whatever an earlier load or step has left with them::

    rank 0   bias [0, 2) of 3   exp_avg, step 7   says: exp_avg is float32, step is 7
    rank 1   bias [2, 3)        exp_avg, step 7   has to have the same names
    rank 2   no element         nothing           exp_avg (0,), step 7

Which ranks hold what is the layout's to say, so all ranks ask and answer alike.
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

from composable_fsdp.comm import collectives
from composable_fsdp.errors import CheckpointError, DesyncError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.consensus import shard_groups
from composable_fsdp.optim.names import Named
from composable_fsdp.tree.state import _FSDPState

Values = dict[str, Any]


class _Elements(NamedTuple):
    """Stands for a state with an element for each of the parameter's."""

    dtype: torch.dtype


class _Number(NamedTuple):
    """Stands for a 0-d tensor."""

    value: Tensor
    """On the CPU."""
    is_on_cpu: bool


Entry = tuple[str, list[str], dict[str, Any]]
"""A parameter's name, the names of its state tensors, and for ranks that hold nothing
of it what its state is."""


def is_scalar(value: Any) -> bool:
    """Whether a state is one value on all ranks, and not cut as the parameter is."""
    return not isinstance(value, Tensor) or value.ndim == 0


def require_same_state(
    members: list[Named],
    states: list[Values],
    by_handle: dict[int, list[int]],
    units: Sequence[_FSDPState] = (),
) -> None:
    """Refuse on all ranks what one of them cannot put together.

    First, because a rank that raises alone, or has nothing to send, hangs the others.
    The groups of ``units`` take part, whether or not the optimizer has their parameters
    here. Of parameters of which this rank holds no element, ``states`` are replaced by
    what they are on the others, with empty tensors.

    Collective: one exchange of objects per shard group.
    Raises: CheckpointError, DesyncError.
    """
    misfits = [_misfit(n, values) for n, values in zip(members, states, strict=True)]
    problem = next(filter(None, misfits), "")
    cut: dict[dist.ProcessGroup, list[int]]
    cut = {group: [] for group in shard_groups(units)}
    for indices in by_handle.values():
        for i in indices:
            handle = members[i].handle
            assert handle is not None
            assert handle.groups.shard is not None
            cut.setdefault(handle.groups.shard, []).append(i)
    # All exchanges before any error, so that nobody is missed in the next one.
    told = []
    for group, indices in cut.items():
        indices.sort(key=lambda i: members[i].fqn)
        mine = [_entry(members[i], states[i]) for i in indices]
        told.append((indices, collectives.all_gather_object((mine, problem), group)))
    for _, answers in told:
        for rank, (_, their_problem) in enumerate(answers):
            if their_problem:
                raise CheckpointError(
                    their_problem if problem else f"On rank {rank}: {their_problem}"
                )
    for indices, answers in told:
        _take([members[i] for i in indices], states, indices, [a for a, _ in answers])
    if problem:
        raise CheckpointError(problem)


def _misfit(named: Named, values: Values) -> str:
    """Say which state is not element-wise; empty if all is, or nothing is cut."""
    if not named.is_cut:
        return ""
    for key, value in values.items():
        if not is_scalar(value) and value.shape != named.parameter.shape:
            return (
                f"Optimizer state {key!r} of {quoted(named.fqn)} has shape "
                f"{tuple(value.shape)}; expected a scalar or the shape of this rank's "
                f"shard, {tuple(named.parameter.shape)}. State that is not "
                "element-wise, or made before fully_shard, cannot be put together from "
                "shards: use an element-wise optimizer, and make it hold state only "
                "after fully_shard."
            )
    return ""


def _entry(named: Named, values: Values) -> Entry:
    keys = sorted(key for key, value in values.items() if not is_scalar(value))
    return named.fqn, keys, _described(values) if named.speaks_for_absent else {}


def _described(values: Values) -> dict[str, Any]:
    """The state ``values`` without elements, as other ranks can be told."""
    described: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            try:
                pickle.dumps(value)
            except Exception:
                continue  # nothing of it can be told
            described[key] = value
        elif value.ndim:
            described[key] = _Elements(value.dtype)
        else:
            described[key] = _Number(value.detach().cpu(), value.device.type == "cpu")
    return described


def _made(told: Any, leaf: Tensor) -> Any:
    """A state as it was told, for a leaf without elements."""
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
    """Compare what ranks of one group have said, and take what this one lacks.

    Raises: DesyncError, on all ranks of the group.
    """
    fqns = [named.fqn for named in members]
    for rank, entries in enumerate(answers):
        if [*map(itemgetter(0), entries)] != fqns:
            own = [_entry(members[at], states[i]) for at, i in enumerate(indices)]
            raise DesyncError(_other_names(own, entries, rank))
    for at, (named, i) in enumerate(zip(members, indices, strict=True)):
        assert named.region is not None
        holders, own_rank = named.holders, named.region.rank
        keys = {rank: answers[rank][at][1] for rank in holders}
        first = holders[0]
        other = next((rank for rank in holders if keys[rank] != keys[first]), None)
        if other is not None:
            here = own_rank if own_rank in keys else first
            there = next(rank for rank in holders if keys[rank] != keys[here])
            raise DesyncError(_other_state(named.fqn, keys, here, there, own_rank))
        if own_rank not in keys:
            described = answers[first][at][2]
            states[i] = {k: _made(v, named.parameter) for k, v in described.items()}


_WAY_OUT = (
    "Build the optimizer with the same parameters on every rank, and step all of them."
)


def _other_names(mine: Sequence[Any], theirs: Sequence[Entry], rank: int) -> str:
    nothing: Any = ("nothing more", [])
    pairs = zip_longest(mine, theirs, fillvalue=nothing)
    here, there = next(pair for pair in pairs if pair[0][0] != pair[1][0])
    return (
        f"Optimizer state differs over ranks: here {quoted(here[0])} has {here[1]}, on "
        f"rank {rank} of the shard group {quoted(there[0])} has {there[1]}. {_WAY_OUT}"
    )


def _other_state(
    fqn: str, keys: dict[int, list[str]], here: int, there: int, own_rank: int
) -> str:
    where = "here" if here == own_rank else f"on rank {here} of the shard group"
    return (
        f"Optimizer state differs over ranks: {where} {quoted(fqn)} has {keys[here]}, "
        f"on rank {there} of the shard group {quoted(fqn)} has {keys[there]}. "
        f"{_WAY_OUT}"
    )
