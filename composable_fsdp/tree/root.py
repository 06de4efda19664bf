"""Lazy initialization: the outermost unit becomes the root and gets the caches.

Runs at the first forward of any unit (or the first call that needs a root), so that
users can call ``fully_shard`` on the modules in any number of calls before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from composable_fsdp.comm.device import Streams, make_streams
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning.walk import named
from composable_fsdp.tree.moments import MODELS_MEET, TREE_FOUND, TREE_INITIALIZED
from composable_fsdp.tree.state import (
    RuntimeContext,
    _FSDPState,
    _RootFSDPState,
    root_of,
)
from composable_fsdp.tree.traversal import walk_states


def ensure_root(state: _FSDPState) -> RuntimeContext:
    """Return the context of the tree of ``state``; initialize the tree if needed.

    Raises: CompositionError, if options of the tree differ, or if the root is a list.
    """
    if state.context is None:
        _initialise(outermost(state))
    assert state.context is not None
    return state.context


def outermost(state: _FSDPState) -> _FSDPState:
    """Return the outermost unit that contains the module of ``state``."""
    while (parent := state.parent) is not None:
        state = parent
    return state


def _initialise(top: _FSDPState) -> None:
    """Make ``top`` the root of its tree; fill the caches and the units' context."""
    if len(top.modules) > 1:
        raise CompositionError(
            f"The outermost unit is a list of {len(top.modules)} modules, and a list "
            "has no forward that starts an iteration. Apply fully_shard to the module "
            "that holds them, too."
        )
    found = list(walk_states(top.module))
    _require_equal_options(top, found)
    # Only now is the unit known whose ranks are those of all the data.
    for check in TREE_FOUND:
        check(top.handle, [(fqn, state.handle) for fqn, _, state in found])
    # The caches are slots of the base class, so only the class changes: every reference
    # to this state, weak ones included, stays good.
    top.__class__ = _RootFSDPState
    root = cast("_RootFSDPState", top)
    context = RuntimeContext(weakref.ref(root), make_streams(root.device))
    for fqn, _, state in found:
        state._is_root = state is root
        state.fqn = state.handle.full_fqn = fqn
        state.context = context
        # The default reshards after forward, except for the root, which backward would
        # gather again at once.
        if state.settings.reshard_after_forward is None:
            state.settings.reshard_after_forward = state is not root
    states = [state for _, _, state in found]
    set_param_paths(top.module, states)
    root._root_states = tuple(states)
    context.handles = tuple([state.handle for state in states])
    # No generators, of which each step is a call for each unit.
    context.lists = tuple([s for s in states if s.modules[1:]])
    casting = [s for s in states if s.precision and s.precision.buffer_dtype]
    context.precisions = tuple(casting)
    context.offload = True in [each.layout.offload for each in context.handles]
    set_streams(context, root.device)
    for begin in TREE_INITIALIZED:
        begin(context)


def set_param_paths(module: nn.Module, states: Sequence[_FSDPState]) -> None:
    """Tell units of several modules the paths of their modules from ``module``."""
    # Other units need no table: their parameters lie below the path of the unit.
    several = [state.handle for state in states if len(state.modules) > 1]
    if not several:
        return
    paths = {id(each): fqn for fqn, each in named(module)}
    for handle in several:
        owners = dict.fromkeys(map(id, handle.layout.owners))
        handle.paths = {key: paths[key] for key in owners if key in paths}


def unit_paths(state: _FSDPState) -> list[str]:
    """Return the path of each module of a unit from the outermost unit."""
    if len(state.modules) == 1:
        return [state.fqn]
    paths = {id(each): fqn for fqn, each in named(outermost(state).module)}
    return [paths.get(id(each), state.fqn) for each in state.modules]


def set_streams(context: RuntimeContext, device: torch.device) -> None:
    """Give the tree the side streams of its compute device."""
    context.streams = make_streams(device)
    # Shards in host memory are read by copies that an optimizer must not overtake.
    context.streams.reads_host = context.offload


def share_streams(contexts: Sequence[RuntimeContext]) -> None:
    """Give all trees the side streams of the first tree on the same device."""
    by_device: dict[torch.device, Streams] = {}
    for context in contexts:
        # A stream belongs to a device, so trees on other devices keep their own.
        streams = by_device.setdefault(context.streams.device, context.streams)
        # Optimizers wait for copies of shards in host memory, of any of the trees.
        streams.reads_host = streams.reads_host or context.streams.reads_host
        context.streams = streams


def forget_root(context: RuntimeContext) -> None:
    """Undo lazy initialization of a tree between steps, so that units can be added."""
    root = root_of(context)
    for state in root._root_states:
        state._is_root = state.context = None
    root._root_states = ()
    root.__class__ = _FSDPState  # type: ignore[assignment]  # as it was made


def _require_equal_options(
    top: _FSDPState, found: Sequence[tuple[str, nn.Module, _FSDPState]]
) -> None:
    """Raise CompositionError if options that must be equal in a tree differ."""
    first = top.options
    for fqn, _, state in found:
        own, name = state.options, "limit_all_gathers"
        if own.limit_all_gathers == first.limit_all_gathers:
            if own.use_orig_params == first.use_orig_params:
                continue
            name = "use_orig_params"
        raise CompositionError(
            f"{name} must be equal in one tree: {quoted(top.fqn)} has "
            f"{getattr(first, name)}, {quoted(join_name(top.fqn, fqn))} has "
            f"{getattr(own, name)}. Pass the same value to both calls."
        )


def meet_over(
    states: Iterable[_FSDPState],
    call: Call,
    *,
    replicas: bool = False,
    always: bool = True,
) -> None:
    """Wait until every rank that shards one of the units makes an equal ``call``."""
    states = list(states)
    pairs = [(s.handle.groups.shard, s.handle.groups.replicate) for s in states]
    # All shard groups before the first replicate group, on all ranks alike.
    shards = [shard for shard, _ in pairs]
    groups = shards + [copies for _, copies in pairs] if replicas else shards
    # Ranks of tensor parallelism hold other parts of the same parameters.
    groups = groups + [g for s in states for g in groups_of(s.handle.layout.forms)]
    meet(
        dict.fromkeys(group for group in groups if group is not None),
        call,
        always=always,
    )


def compare_models(state: _FSDPState, *, replicas: bool, written: bool = False) -> None:
    """Ensure that all ranks have sharded the same model as the tree of ``state``.

    Raises: DesyncError with the first difference, on all ranks alike.
    """
    for compare in MODELS_MEET:
        compare(state, replicas=replicas, written=written)
