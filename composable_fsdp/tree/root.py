"""Lazy initialization: the outermost unit becomes the root and fills the caches.

It runs at the first forward through any unit (or the first call that needs a root), so
that units can be applied one by one in any number of calls before.
"""

from __future__ import annotations

from typing import cast

from composable_fsdp.comm.device import make_streams
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.tree.order_logs import assign_order_logs
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, _RootFSDPState
from composable_fsdp.tree.traversal import walk_states

_EQUAL_IN_A_TREE = ("limit_all_gathers", "use_orig_params")


def ensure_root(state: _FSDPState) -> RuntimeContext:
    """Return the context of the tree that ``state`` belongs to, made now if needed.

    Starts at the outermost unit that holds ``state``'s module; sends nothing.

    Raises: CompositionError, if settings that must be equal in one tree differ, or the
    outermost unit is a list of modules.
    """
    if state.context is None:
        _initialise(outermost(state))
    assert state.context is not None
    return state.context


def outermost(state: _FSDPState) -> _FSDPState:
    """The unit without a unit above it that holds ``state``'s module."""
    while (parent := state.parent) is not None:
        state = parent
    return state


def root_of(context: RuntimeContext) -> _RootFSDPState:
    """The root of a context. It is alive while any module of its tree can run."""
    root = context.root()
    assert root is not None
    return root


def _initialise(top: _FSDPState) -> None:
    if len(top.modules) > 1:
        raise CompositionError(
            f"The outermost unit is a list of {len(top.modules)} modules, and a list "
            "has no forward that starts an iteration. Apply fully_shard to the module "
            "that holds them, too."
        )
    found = list(walk_states(top.module))
    _check_equal([(join_name(top.fqn, fqn), state) for fqn, _, state in found])
    # The caches are slots of the base class, so only the class changes: every reference
    # to this state, weak ones included, stays good.
    top.__class__ = _RootFSDPState
    root = cast("_RootFSDPState", top)
    context = RuntimeContext(root, root.device)
    for fqn, _, state in found:
        state._is_root = state is root
        state.fqn = state.handle.full_fqn = fqn
        state.context = context
        if state.reshard_after_forward is None:
            # Backward would gather the root again at once.
            state.reshard_after_forward = state is not root
    root._root_states = tuple(state for _, _, state in found)
    root._root_handles = tuple(state.handle for _, _, state in found)
    context.handles = root._root_handles
    context.lists = tuple(s for s in root._root_states if len(s.modules) > 1)
    context.offload = any(handle.offload for handle in context.handles)
    context.precisions = tuple(
        s for s in root._root_states if s.precision and s.precision.buffer_dtype
    )
    context.streams = make_streams(root.device)
    if context.streams is not None:
        context.streams.reads_host = context.offload
    assign_order_logs(context)


def forget_root(context: RuntimeContext) -> None:
    """Undo lazy initialization of a tree that is between steps, so units can be added.

    The next forward, or question that needs a root, initialises it again.
    """
    root = root_of(context)
    for state in root._root_states:
        state._is_root = state.context = None
    root._root_states, root._root_handles = (), ()
    root.__class__ = _FSDPState  # type: ignore[assignment]  # as it was made


def _check_equal(found: list[tuple[str, _FSDPState]]) -> None:
    first_fqn, first = found[0]
    for fqn, state in found[1:]:
        for name in _EQUAL_IN_A_TREE:
            mine, other = getattr(first.options, name), getattr(state.options, name)
            if mine != other:
                raise CompositionError(
                    f"{name} must be equal in one tree: {quoted(first_fqn)} has "
                    f"{mine}, "
                    f"{quoted(fqn)} has {other}. Pass the same value to both calls."
                )
