"""Full parameters outside the step, as a context.

Three levels: ``_unshard_state`` for one unit (``summon.py``),
``_unshard_params_recurse`` for the units of a tree, ``unshard_params`` for users.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from composable_fsdp.access.settings import units_of
from composable_fsdp.access.unsharded_unit import _unshard_state
from composable_fsdp.access.writeback_consensus import (
    failed_ranks,
    report_failure,
    require_same_values,
)
from composable_fsdp.errors import DesyncError
from composable_fsdp.phases import Phase
from composable_fsdp.planning import walk
from composable_fsdp.runtime.offload import synchronize_copy_stream
from composable_fsdp.runtime.recover import require_idle
from composable_fsdp.runtime.unshard import free_oldest
from composable_fsdp.tree.root import ensure_root, forget_root
from composable_fsdp.tree.state import (
    RuntimeContext,
    _FSDPState,
    _get_module_fsdp_state,
)
from composable_fsdp.tree.traversal import _get_fsdp_states, require_module


@contextmanager
def unshard_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    check_same: bool = False,
) -> Iterator[None]:
    """Show full parameters in ``module`` while the block runs.

    Args:
        module: any module that is or holds a fully sharded module, or parts of one:
            that unit is shown as well, all of it.
        recurse: also the units below; else only the unit that ``module`` itself is.
        writeback: what the block wrote into the parameters reaches the shards. Each
            rank keeps the part that it holds, and each replica its own, so write the
            same on all ranks; with ``rank0_only`` rank 0's values reach every shard.
        rank0_only: only rank 0 of each shard group gets full parameters; the others
            keep seeing their shards. What is written back is that of the one rank that
            is first in its shard group and among the replicas.
        offload_to_cpu: the full parameters are copies in host memory, made unit by
            unit, so device memory holds one unit at a time.
        with_grads: ``.grad`` of the full parameters is the full gradient, where any
            rank has one; with ``writeback`` what the block makes of it is kept.
        check_same: compare the values over ranks before they are written back.

    Collective: per unit one all-gather over the shard group (with ``rank0_only`` one
    gather per region, and with ``writeback`` one scatter per region on exit); with
    ``with_grads`` the same again, and one all-reduce of a byte per parameter (with
    ``rank0_only`` and ``writeback`` one more on exit). With ``writeback`` ranks tell
    each other on exit that none raised: one all-reduce of a number per shard and
    replicate group. With ``check_same`` one more of four numbers per parameter. All
    its ranks must enter.
    Raises: PhaseError, inside forward, backward or another such block; what the block
    raises, and on the other ranks DesyncError: nothing is written on any; DesyncError,
    naming a parameter that ``check_same`` found to differ, and nothing is written.

    >>> with unshard_params(model, writeback=True):
    ...     model.head.weight.data.zero_()
    """
    around = _units_around(module) if recurse else []
    tops = [*around, *_tops(module, recurse=recurse, needed=not around)]
    # All of them first: units side by side share one tree.
    contexts = {id(c): c for c in (require_idle(s, "unshard_params") for s in tops)}
    with ExitStack() as stack:
        units: list[_FSDPState] = []
        for state in tops:
            context = ensure_root(state)
            if id(context) in contexts:
                contexts.pop(id(context))
                stack.enter_context(_summon(context, state, rank0_only))
            below = recurse and state not in around
            units += _get_fsdp_states(state.module) if below else [state]
        stack.enter_context(
            _unshard_states(
                units,
                writeback=writeback,
                rank0_only=rank0_only,
                offload_to_cpu=offload_to_cpu,
                with_grads=with_grads,
                check_same=check_same and not rank0_only,
            )
        )
        yield


def _units_around(module: nn.Module) -> list[_FSDPState]:
    """The units above ``module`` that have parameters in its tree, outermost first."""
    require_module(module, "unshard_params")
    inside = {id(each): each for each in walk.modules(module)}
    found: dict[int, _FSDPState] = {}
    for each in inside.values():
        state = _get_module_fsdp_state(each)
        if state is not None and not any(id(m) in inside for m in state.modules):
            owners = state.handle.owners
            if id(state) not in found and any(id(m) in inside for m in owners):
                found[id(state)] = state
    return list(found.values())


@contextmanager
def _summon(
    context: RuntimeContext, state: _FSDPState, rank0_only: bool
) -> Iterator[None]:
    """Mark the tree: no forward, and no second block, until the end of this one."""
    context.summoned, context.rank0_only = state, rank0_only
    try:
        yield
    finally:
        context.summoned = None
        free_oldest(context, keep=0)
        synchronize_copy_stream(context)


def _tops(module: nn.Module, *, recurse: bool, needed: bool) -> list[_FSDPState]:
    """The uppermost units in the tree of ``module``; without ``recurse`` its own.

    Raises: CompositionError, if there is none and one is ``needed``.
    """
    if not needed and not _get_fsdp_states(module):
        return []
    what = "unshard_params" if recurse else "unshard_params(recurse=False)"
    states = units_of(module, what, recurse=recurse)
    if not recurse:
        return states
    tops: list[_FSDPState] = []
    covered: set[int] = set()
    # Outer units come first. Not by their parents: a unit that stands in two places has
    # one parent, and may be below another unit of these as well.
    for state in states:
        if id(state) not in covered:
            tops.append(state)
            covered.update(map(id, _get_fsdp_states(state.module)))
    return tops


@contextmanager
def _unshard_params_recurse(
    module: nn.Module,
    state: _FSDPState,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Full parameters of ``state``'s unit and, with ``recurse``, of the units below it.

    Collective, Raises: as ``unshard_params``.
    """
    states = _get_fsdp_states(module) if recurse else [state]
    with ExitStack() as stack:
        if ensure_root(state).summoned is None:
            context = require_idle(state, "unshard_params")
            stack.enter_context(_summon(context, state, rank0_only))
        stack.enter_context(
            _unshard_states(
                states,
                writeback=writeback,
                rank0_only=rank0_only,
                offload_to_cpu=offload_to_cpu,
                with_grads=with_grads,
            )
        )
        yield


@contextmanager
def _unshard_states(
    states: list[_FSDPState],
    *,
    writeback: bool,
    check_same: bool = False,
    what: str = "unshard_params(writeback=True)",
    **how: bool,
) -> Iterator[None]:
    """Full parameters of ``states``, written back on all ranks of a unit or on none.

    ``what`` is what the user called; ``how`` is passed on. Collective, Raises: as
    ``unshard_params``.
    """
    handles = [state.handle for state in states]
    failed: list[int | None] = []
    with ExitStack() as stack:
        shown = [
            stack.enter_context(_unshard_state(each, writeback=writeback, **how))
            for each in states
        ]
        try:
            yield
            if writeback:
                # All units first: one that does not fit leaves every shard as it was.
                for unit in shown:
                    unit.take_assigned()
        except GeneratorExit:
            raise  # thrown away, at a time that the ranks do not share
        except BaseException:
            if writeback:
                report_failure(handles)
            raise
        if writeback:
            failed = failed_ranks(handles)
            for unit, rank in zip(shown, failed, strict=True):
                unit.is_agreed = rank is None
                if check_same and unit.is_agreed:
                    require_same_values(unit.handle, unit.fulls)
    rank = next((rank for rank in failed if rank is not None), None)
    if rank is not None:
        raise DesyncError(
            f"Rank {rank} raised inside {what}, so nothing was written here either, "
            "and all ranks have the values from before the block. Look at the error of "
            f"rank {rank}."
        )


@contextmanager
def unshard_own(module: nn.Module, state: _FSDPState) -> Iterator[None]:
    """Full parameters, kept on exit, of the unit that ``module`` is; for ``apply``.

    Also of units below that are lists, which no call of their own will show. Does
    nothing inside a block that shows them already. A tree that was not initialised is
    left so: units above may still be made.

    Collective: one all-gather per unit, and one all-reduce of a number per shard and
    replicate group, as ``unshard_params``.
    Raises: PhaseError, inside forward or backward; DesyncError, if another rank raised
    inside.
    """
    lists = [each for each in _get_fsdp_states(module) if len(each.modules) > 1]
    hidden = [s for s in (state, *lists) if s.handle.phase is not Phase.SUMMON]
    was_new = state.context is None
    context = ensure_root(state)
    with ExitStack() as stack:
        if context.summoned is None:
            stack.enter_context(
                _summon(require_idle(state, "apply"), state, rank0_only=False)
            )
        stack.enter_context(
            _unshard_states(hidden, writeback=True, rank0_only=False, what="apply")
        )
        yield
    if was_new:
        forget_root(context)
