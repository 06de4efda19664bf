"""Before the first forward of a model made on meta: values missing, or drawn twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

import torch.distributed as dist

from composable_fsdp.errors import PlanError
from composable_fsdp.features.guard.compare import gather
from composable_fsdp.flat.param_ref import ParamRef, find_param
from composable_fsdp.flat.residency import written
from composable_fsdp.flat.value_hash import WAY_OUT, digest_of_start
from composable_fsdp.naming import listed, quoted
from composable_fsdp.runtime.meta_values import require_filled, unfilled_parameters
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of

# A few are enough: an initialiser draws all parameters.
_MOST = 64
"""Most parameters whose starts a rank sends."""


def require_initialized(context: RuntimeContext) -> None:
    """Raise if a parameter or buffer has no values, or ranks drew the same numbers.

    Collective: of a model that was sharded on meta, an all-gather of objects per shard
        group.
    """
    root = root_of(context)
    states = root._root_states
    by_group: dict[dist.ProcessGroup | None, list[_FSDPState]] = {}
    # Groups in the order of units, the same on all ranks.
    for state in states:
        by_group.setdefault(state.handle.groups.shard, []).append(state)
    for group, units in by_group.items():
        empty = [name for state in units for name in unfilled_parameters(state)]
        # ``same_models`` has told all ranks. Without a shard group this rank has whole
        # values, as its replicas have; in one a rank may have no rows of a parameter,
        # and must raise with the others.
        if group is not None and any(s.initial.was_on_meta for s in units):
            drawn = list(islice(_drawn(root, units), _MOST))
            told = gather((empty, drawn), [group])
            empty = list(dict.fromkeys(chain(*(each for each, _ in told.values()))))
            _require_own_numbers({rank: starts for rank, (_, starts) in told.items()})
        if empty:
            raise PlanError(
                f"Parameters {listed(map(quoted, empty))} were on meta and nothing has "
                "filled them since they got memory (to_empty): no checkpoint that was "
                "loaded has them, and no initialiser wrote to them. Call "
                "init_weights(module) with the module that holds them, or write to "
                "them inside of 'with unshard_params(model):', on every rank."
            )
    require_filled(states)


def starts(
    top: _FSDPState, units: Iterable[_FSDPState]
) -> Iterator[tuple[int, ParamRef]]:
    """Yield the starts of shards of ``units`` written to since ``fully_shard``."""
    changed = {
        each.handle
        for each in units
        if each.handle.groups.shard is not None
        and not -1 < each.handle.writes.at_build == written(each.handle.layout)
    }
    # An initialiser draws in this order, whatever the order in the flat buffer.
    for module in top.modules if changed else ():
        for ref in map(find_param, module.parameters()):
            if ref is None or ref.handle not in changed:
                continue
            if digest := digest_of_start(ref.leaf.detach()):
                yield digest, ref


def _drawn(root: _FSDPState, units: Iterable[_FSDPState]) -> Iterator[tuple[int, str]]:
    """Yield the starts of parameters that were seen to be drawn."""
    seen = {each.handle: each.initial.drawn for each in units}
    for digest, ref in starts(root, units):
        # Values that were written since are not those that were drawn.
        if seen[ref.handle].get(ref.slot.index) == digest:
            yield digest, ref.name


def _require_own_numbers(told: dict[int, list[tuple[int, str]]]) -> None:
    """Raise PlanError if two ranks drew the same numbers for their rows."""
    first: dict[int, tuple[int, str]] = {}
    for rank, starts in told.items():
        for digest, name in starts:
            # Names may differ: a rank may have no rows of the parameter drawn first.
            before, other = first.setdefault(digest, (rank, name))
            if before != rank:
                raise PlanError(
                    f"Ranks drew the same random numbers: {quoted(name)} begins on "
                    f"rank {rank} as {quoted(other)} does on rank {before}. {WAY_OUT}"
                )
