"""Before the first forward of a model made on meta: values missing, or drawn twice.

``guard.same_models`` has told all ranks that shards were on meta. The ranks of a shard
group exchange their findings, and raise alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.param_ref import in_model_order
from composable_fsdp.flat.start_digest import WAY_OUT, digest_of_start
from composable_fsdp.naming import listed, quoted
from composable_fsdp.runtime.meta_values import require_filled, unfilled_parameters
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of

# A few are enough: an initialiser draws all parameters.
_MOST = 64
"""Most parameters whose starts a rank sends."""


class _Found(NamedTuple):
    """What a rank found in its shards."""

    rank: int
    empty: list[str]
    """Names of parameters that hold only marks of ``to_empty``."""
    drawn: list[tuple[int, str]]
    """Starts of random numbers that were seen to be drawn, and are there still; with
    the name of the parameter."""


def require_initialized(context: RuntimeContext) -> None:
    """Raise if a parameter or buffer has no values, or ranks drew the same numbers.

    Collective: of a model that was sharded on meta, an all-gather of objects per shard
        group.
    Raises: PlanError, on all ranks of a shard group alike.
    """
    states = root_of(context)._root_states
    by_group: dict[dist.ProcessGroup | None, list[_FSDPState]] = {}
    for state in states:
        by_group.setdefault(state.handle.groups.shard, []).append(state)
    for group, units in by_group.items():
        rank = dist.get_rank() if dist.is_initialized() else 0
        empty = [name for state in units for name in unfilled_parameters(state)]
        # Without a shard group this rank has whole values, as all its replicas have.
        told = [_Found(rank, empty, [])]
        if group is not None and any(s.initial.was_on_meta for s in units):
            # A rank may have no rows of a parameter, and must raise with the others.
            drawn = list(chain(*map(_drawn, units)))[:_MOST]
            told = collectives.all_gather_object(_Found(rank, empty, drawn), group)
        _require_values(told)
        _require_own_numbers(told)
    require_filled(states)


def _drawn(state: _FSDPState) -> Iterator[tuple[int, str]]:
    """Yield the starts of a unit's parameters that were seen to be drawn."""
    for ref in in_model_order(state.handle):
        # Values that were written since are not those that were drawn.
        digest = state.initial.drawn.get(ref.slot.index, 0)
        if digest and digest == digest_of_start(ref.leaf.detach()):
            yield digest, ref.name


def _require_values(told: Sequence[_Found]) -> None:
    """Raise PlanError if a parameter has no values on a rank."""
    names = dict.fromkeys(chain(*(each.empty for each in told)))
    if names:
        raise PlanError(
            f"Parameters {listed(map(quoted, names))} were on meta and nothing has "
            "filled them since they got memory (to_empty): no checkpoint that was "
            "loaded has them, and no initialiser wrote to them. Call "
            "init_weights(module) with the module that holds them, or write to them "
            "inside of 'with unshard_params(model):', on every rank."
        )


def _require_own_numbers(told: Sequence[_Found]) -> None:
    """Raise PlanError if two ranks drew the same numbers for their rows."""
    first: dict[int, tuple[int, str]] = {}
    for each in told:
        for digest, name in each.drawn:
            # Names may differ: a rank may have no rows of the parameter drawn first.
            rank, other = first.setdefault(digest, (each.rank, name))
            if rank != each.rank:
                raise PlanError(
                    f"Ranks drew the same random numbers: {quoted(name)} begins on "
                    f"rank {each.rank} as {quoted(other)} does on rank {rank}. "
                    f"{WAY_OUT}"
                )
