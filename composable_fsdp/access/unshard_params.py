"""Full parameters outside the step, as a context.

Three levels: ``_unshard_state`` for one unit, ``_unshard_params_recurse`` for the units
of a tree, ``unshard_params`` for users.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from composable_fsdp.comm import collectives
from composable_fsdp.errors import CompositionError, PhaseError, PlanError
from composable_fsdp.flat import views
from composable_fsdp.flat.forms import has_two_forms
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.integrity import full_homes, is_at, reattach_full
from composable_fsdp.naming import WRAPPED_MODULE, join, shown
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.backward import use_form
from composable_fsdp.runtime.offload import on_device, wait_for_copies
from composable_fsdp.runtime.recover import require_idle
from composable_fsdp.runtime.unshard import reshard, retire, unshard, wait_unsharded
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import RuntimeContext, _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_root_states, _get_fsdp_states


@contextmanager
def unshard_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show full parameters in ``module`` while the block runs.

    Args:
        module: any module that is or holds a fully sharded module. recurse: also the
        units below; else only the unit that ``module`` itself is. writeback: what the
        block wrote into the parameters reaches the shards. Each rank
            writes its own part; with ``rank0_only`` rank 0's values reach every shard.
        rank0_only: only rank 0 of each shard group gets full parameters; the others
        keep
            seeing their shards.

    Collective: per unit one all-gather over the shard group (with ``rank0_only`` one
    gather per region, and with ``writeback`` one scatter per region on exit). All its
    ranks must enter. After a raise in the block nothing is written and nothing is sent.
    Raises: PhaseError, inside forward, backward or another such block.

    >>> with unshard_params(model, writeback=True):     # doctest: +SKIP
    ...     model.head.weight.data.zero_()
    """
    if offload_to_cpu or with_grads:
        raise PlanError(
            "unshard_params(offload_to_cpu=..., with_grads=...) is not available in "
            "this version of composable_fsdp. Leave both out; copy what you need "
            "inside the block."
        )
    tops = _tops(module, recurse=recurse)
    # All of them first: units side by side share one tree.
    contexts = {id(c): c for c in (require_idle(s, "unshard_params") for s in tops)}
    with ExitStack() as stack:
        for state in tops:
            context = ensure_root(state)
            if id(context) in contexts:
                contexts.pop(id(context))
                stack.enter_context(_summon(context, state, rank0_only))
            stack.enter_context(
                _unshard_params_recurse(
                    state.module,
                    state,
                    recurse=recurse,
                    writeback=writeback,
                    rank0_only=rank0_only,
                )
            )
        yield


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
        retire(context, keep=0)
        wait_for_copies(context)


def _tops(module: nn.Module, *, recurse: bool) -> list[_FSDPState]:
    """The uppermost units in the tree of ``module``; without ``recurse`` its own."""
    states = _get_fsdp_states(module)
    if not states:
        raise CompositionError(
            f"unshard_params was called on a {type(module).__name__} that holds no "
            "fully sharded module. Apply fully_shard to it, or call it on the model "
            "that was sharded."
        )
    if not recurse:
        own = [s for s in states if any(m is _inner(module) for m in s.modules)]
        if not own:
            raise CompositionError(
                "unshard_params(recurse=False) was called on a "
                f"{type(module).__name__} that is no fully sharded module itself. Call "
                "it on one, or leave out recurse=False."
            )
        return own
    inside = set(map(id, states))
    roots = set(map(id, _get_fsdp_root_states(module)))
    return [
        s
        for s in states
        if id(s) in roots or (s.parent is not None and id(s.parent) not in inside)
    ]


def _inner(module: nn.Module) -> nn.Module:
    """The module that carries the state: the wrapped one of a wrapper."""
    child = module._modules.get(WRAPPED_MODULE)
    return module if child is None else child


@contextmanager
def _unshard_params_recurse(
    module: nn.Module,
    state: _FSDPState,
    *,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
) -> Iterator[None]:
    """Full parameters of ``state``'s unit and, with ``recurse``, of the units below it.

    Collective, Raises: as ``unshard_params``.
    """
    states = _get_fsdp_states(module) if recurse else [state]
    with ExitStack() as stack:
        if ensure_root(state).summoned is None:
            context = require_idle(state, "unshard_params")
            stack.enter_context(_summon(context, state, rank0_only))
        for each in states:
            stack.enter_context(
                _unshard_state(each, writeback=writeback, rank0_only=rank0_only)
            )
        yield
        if writeback:
            # All units first: one that does not fit leaves every shard as it was.
            for each in states:
                _require_shapes(each.handle, rank0_only=rank0_only)


@contextmanager
def _unshard_state(
    state: _FSDPState, *, writeback: bool, rank0_only: bool
) -> Iterator[None]:
    """Full parameters of one unit.

    Collective: one all-gather, or one gather (and scatter) per region; see
    ``unshard_params``. None if the unit's shard group has one rank.
    """
    context, handle = ensure_root(state), state.handle
    handle.phase = Phase.SUMMON
    if has_two_forms(handle):
        # The parameters themselves, and not what compute makes of them.
        use_form(context, state, wide=True)
    if context.streams is not None:
        # The optimizer wrote the shards on the caller's stream.
        context.streams.gather.wait_stream(torch.cuda.current_stream(state.device))
    shows = not rank0_only or handle.groups.rank == 0
    kept = [(r.shard, r.shard.clone()) for r in handle.regions if not r.is_cut]
    written = False
    try:
        if rank0_only and handle.groups.shard is not None:
            _gather_to_first(handle)
        else:
            unshard(context, handle)
        if shows:
            wait_unsharded(handle)
        yield
        if writeback:
            _require_shapes(handle, rank0_only=rank0_only)
            _write_back(handle, rank0_only=rank0_only)
            written = True
    finally:
        handle.phase = Phase.IDLE
        if handle.is_full:
            reattach_full(handle)
        reshard(context, handle)
        use_form(context, state, wide=False)
        if not written:
            # Where nothing is cut, the block wrote into the shard itself.
            for shard, values in kept:
                shard.copy_(values)


def _gather_to_first(handle: FlatParamHandle) -> None:
    """Fill ``full`` on the first rank of the shard group; others allocate nothing."""
    group = handle.groups.shard
    assert group is not None
    first = handle.groups.rank == 0
    if first:
        views.allocate_full(handle)
    for region in handle.regions:
        if region.is_cut and region.layout.padded_numel:
            full = region.full if first else None
            collectives.gather_flat(full, on_device(handle, region.shard), group)


@torch.no_grad()
def _write_back(handle: FlatParamHandle, *, rank0_only: bool) -> None:
    """Copy the full values into the shards: own parts, or the first rank's to all.

    Replicas of NO_SHARD hold everything: with ``rank0_only`` the first one's values are
    broadcast. Collective: one scatter (or broadcast) per region with ``rank0_only``.
    """
    groups = handle.groups
    first = groups.rank == 0
    for region in handle.regions:
        if not region.layout.padded_numel:
            continue
        shard = on_device(handle, region.shard)
        if rank0_only and groups.shard is not None:
            full = region.full if first else None
            collectives.scatter_flat(shard, full, groups.shard)
        elif region.is_cut:
            shard.copy_(region.own_slice)
        if rank0_only and groups.replicate is not None:
            collectives.broadcast(shard, groups.replicate)
        if shard is not region.shard:
            region.shard.copy_(shard)


def _require_shapes(handle: FlatParamHandle, *, rank0_only: bool) -> None:
    """Take up parameters that the block assigned, or refuse them by name.

    ``parameter.data = values`` counts, too: the parameter stays, its memory does not.
    """
    full = not rank0_only or handle.groups.rank == 0
    homes = {id(leaf): home for leaf, home in full_homes(handle)} if full else {}
    for info, (parameters, name, sharded, whole) in zip(
        handle.infos, handle.swaps, strict=True
    ):
        home = homes.get(id(whole), sharded)
        found = parameters.get(name)
        if found is (whole if full else sharded) and is_at(found, home):
            continue
        fqn = shown(join(handle.full_fqn, info.fqn))
        if (
            not isinstance(found, torch.Tensor)
            or found.shape != home.shape
            or found.dtype != home.dtype
        ):
            got = (
                f"{tuple(found.shape)} {found.dtype}"
                if isinstance(found, torch.Tensor)
                else type(found).__name__
            )
            raise PhaseError(
                f"Inside unshard_params parameter {fqn} was replaced by {got}; "
                f"expected {tuple(home.shape)} {home.dtype}. Write into it in "
                "place, for example parameter.data.copy_(values)."
            )
        with torch.no_grad():
            # A clone: what was found may be another view of the same memory.
            home.copy_(found.clone())
        parameters[name] = whole if full else sharded
