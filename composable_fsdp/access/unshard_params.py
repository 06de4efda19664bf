"""Full parameters outside the step, as a context manager.

::

    unshard_params             public: finds the units, marks their trees
      _unshard_states          several units; agreement of all ranks at the end
        _unshard_state         a single unit (unsharded_unit.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from composable_fsdp.access.block import block
from composable_fsdp.access.other_parts import Route
from composable_fsdp.access.settings import units_of
from composable_fsdp.access.unsharded_unit import _unshard_state, require_same_values
from composable_fsdp.comm.meeting import Call, failed_rank, send_failure
from composable_fsdp.errors import DesyncError
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.planning import walk
from composable_fsdp.runtime.offload import synchronize_copy_stream
from composable_fsdp.runtime.recover import settle_tree
from composable_fsdp.runtime.unshard import free_oldest
from composable_fsdp.tree.root import compare_models, meet_over, outermost
from composable_fsdp.tree.state import Summon, _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_states, require_module


@block
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

    They are other objects than the sharded parameters, the same in each block, and show
    this rank's rows after it.

    Args:
        module: A module that is or holds a fully sharded module, or that is a part of a
            unit; the whole unit is then shown.
        recurse: Show the units below, too. False: only the unit ``module`` itself.
            Default True.
        writeback: Keep the block's writes to the parameters. Each rank writes back the
            part that it holds, so the block must write the same values on all ranks;
            with ``rank0_only`` rank 0's go to every shard. Default True.
        rank0_only: Only rank 0 of each shard group gets full parameters; the modules of
            other ranks keep sharded parameters. Default False.
        offload_to_cpu: The full parameters are copies in host memory, made unit by
            unit, so device memory holds at most a single full unit. Default False.
        with_grads: Set ``.grad`` of the full parameters to the full gradients, if any
            rank has a gradient; with ``writeback`` changes of ``.grad`` are kept.
            Default False.
        check_same: Compare the values over ranks before they are written back; ignored
            with ``rank0_only``. Default False.

    Collective: all ranks must enter. Per unit an all-gather over the shard group; with
        ``rank0_only`` a gather per region instead, and with ``writeback`` a scatter per
        region on exit (and a broadcast over the replicate group). ``with_grads`` adds
        an all-reduce of a byte per parameter, the same gather, and with ``rank0_only``
        and ``writeback`` a broadcast per gradient. With
        ``writeback`` the ranks agree on exit that no rank raised: an all-reduce of an
        integer per group. ``check_same`` adds an all-gather of objects.
    Raises: PhaseError, inside forward, backward or another such block; the exception of
        the block, and DesyncError on the other ranks: all keep their old values;
        DesyncError, naming a parameter that ``check_same`` found to differ, or, before
        anything is sent, if another rank makes another call.

    >>> with unshard_params(model, writeback=True):
    ...     model.head.weight.data.zero_()
    """
    if recurse:
        states = units_with_parts(module, "unshard_params")
    else:
        states = units_of(module, "unshard_params(recurse=False)", recurse=False)
    with (
        _summoned(states, rank0_only=rank0_only),
        _unshard_states(
            states,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
            check_same=check_same and not rank0_only,
        ),
    ):
        yield


def units_with_parts(module: nn.Module, what: str) -> list[_FSDPState]:
    """Return the units that hold parts of ``module``. Raises: CompositionError."""
    require_module(module, what)
    inside = {id(each): each for each in walk.modules(module)}
    found: dict[int, _FSDPState] = {}
    for each in inside.values():
        state = _get_module_fsdp_state(each)
        if state is not None and not any(id(m) in inside for m in state.modules):
            owners = state.handle.layout.owners
            if id(state) not in found and any(id(m) in inside for m in owners):
                found[id(state)] = state
    if not found:
        return units_of(module, what, recurse=True)
    return [*found.values(), *_get_fsdp_states(module)]


@contextmanager
def _summoned(
    states: Sequence[_FSDPState], *, rank0_only: bool, what: str = "unshard_params"
) -> Iterator[None]:
    """Mark the trees of ``states`` as in a block. Raises: PhaseError, inside a step."""
    firsts: dict[int, _FSDPState] = {}
    for state in states:
        firsts.setdefault(id(outermost(state)), state)
    # All trees are settled before the first is marked, so that a refusal marks none.
    trees = [(settle_tree(state, what), state) for state in firsts.values()]
    for context, state in trees:
        context.summoned = Summon(state, rank0_only, what=what)
    try:
        yield
    finally:
        for context, _ in trees:
            context.summoned = None
        for context, _ in trees:
            # Free all deferred memory, and wait for copies of the block between host
            # and device: the caller may write shards in host memory next.
            free_oldest(context, keep=0)
            synchronize_copy_stream(context)


def _unshard_params_recurse(
    module: nn.Module,
    state: _FSDPState,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> AbstractContextManager[None]:
    """Return ``unshard_params`` under FSDP1's name, with its arguments."""
    return unshard_params(
        module if recurse else state.module,
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )


_ENTER_EVERYWHERE = (
    "Full values are gathered from all ranks: enter the block on every rank, outside "
    "of any 'if rank == 0'. rank0_only=True spares the others the memory."
)
"""The end of an error of a rank that enters a block alone."""


@contextmanager
def _unshard_states(
    states: list[_FSDPState],
    *,
    writeback: bool,
    check_same: bool = False,
    what: str = "unshard_params(writeback=True)",
    **how: bool,
) -> Iterator[None]:
    """Show full parameters of ``states``; write back on all ranks of a unit or on none.

    ``what`` names the caller in messages; ``how`` is passed to ``_unshard_state``.
    Collective, Raises: as ``unshard_params``.
    """
    call = _call(
        states, what, {**how, "writeback": writeback, "check_same": check_same}
    )
    # A block in a training loop repeats, and an expected call visits no store.
    meet_over(states, call, replicas=writeback, always=False)
    for state in states:
        compare_models(state, replicas=writeback, written=writeback)
    routes = {_route(state): state.handle.layout.device for state in states}
    rank = None
    with ExitStack() as stack:
        shown = [
            stack.enter_context(_unshard_state(each, writeback=writeback, **how))
            for each in states
        ]
        try:
            yield
            if writeback:
                # All units before any write, so that a refusal changes no shard.
                for unit in shown:
                    unit.take_assigned()
        except GeneratorExit:
            # Closed by the garbage collector, at another time on each rank.
            raise
        except BaseException:
            if writeback:
                # The other ranks wait for this rank's flag before they write.
                for groups, device in routes.items():
                    send_failure(groups, device)
            raise
        if writeback:
            # Each _unshard_state writes back on exit, so the agreement must come first.
            failed = {route: failed_rank(route, at) for route, at in routes.items()}
            rank = next((each for each in failed.values() if each is not None), None)
            for state, unit in zip(states, shown, strict=True):
                unit.is_agreed = failed[_route(state)] is None
                if check_same:
                    require_same_values(unit)
    if rank is not None:
        raise DesyncError(
            f"Rank {rank} raised inside {what}, so nothing was written here either, "
            "and all ranks have the values from before the block. Look at the error of "
            f"rank {rank}."
        )


def _call(states: Sequence[_FSDPState], what: str, how: Mapping[str, bool]) -> Call:
    """Return the block as ranks compare it, with the arguments that are set."""
    # ``offload_to_cpu`` copies on this rank alone, and may differ between ranks.
    decide = ("writeback", "rank0_only", "with_grads", "check_same")
    details = tuple(f"{name}=True" for name in decide if how.get(name))
    title = states[0].title if states else ""
    return Call(what.partition("(")[0], title, details, _ENTER_EVERYWHERE)


def _route(state: _FSDPState) -> Route:
    """Return the groups over which an outcome reaches all ranks of a unit."""
    # Ranks of tensor parallelism hold other parts of the parameters that the block
    # writes: all of them write, or none.
    handle = state.handle
    return (*handle.groups.present, *groups_of(handle.layout.forms))
