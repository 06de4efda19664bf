"""``copy.deepcopy`` of a sharded model: shards of its own, the groups of the original.

Python copies a module's attributes one after the other, hooks and registry among them,
and so comes to the state of a unit while the module is half copied::

    deepcopy(module) -> hooks -> state -> copy_state: leaves, submodules, units below
            '--> _modules: all copied by then, found in the memo

A copy is a new tree: whatever unit of it runs first looks for its root again.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

from composable_fsdp.flat import views
from composable_fsdp.flat.build import build_handle, set_divisions
from composable_fsdp.flat.flat_parameter import rebind_flat_parameter
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.planning import walk
from composable_fsdp.planning.planner import Target
from composable_fsdp.runtime.grad_hooks import install_grad_hooks
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.tree.state import OWNERS, _FSDPState
from composable_fsdp.tree.traversal import walk_states

Memo = dict[int, Any]

_NOT_COPIED = (
    "__weakref__",
    "_is_root",
    "_parent",
    "_root_handles",
    "_root_states",
    # Lists of units to prefetch: a copy goes by the order of its forward again.
    "ahead_in_backward",
    "ahead_in_forward",
    "context",
    "handle",
    # Where its own modules keep tensors, it has to find.
    "kept_at",
    "modules",
    "precision",
    "remaining",
    "scans",
    "sums",
)
"""What a copy must not share; the other fields are settings and never change."""


def copy_state(state: _FSDPState, memo: Memo) -> _FSDPState:
    """Return the state of a copied unit, over shards of its own.

    The copy's leaves are copies of the sharded leaves ``(k, *trailing)``, without
    gradients, as those of a copied plain model. It belongs to the tree that is copied
    with it, and to none if only the unit is. Sends nothing.

    Raises: PhaseError, inside a forward, a backward, or a block of ``unshard_params``;
    PlanError, if a leaf was torn out of its shard and does not fit.
    """
    require_between_steps(state, "copy.deepcopy")
    made = _FSDPState()
    # First of all: the modules below lead back here.
    memo[id(state)] = made
    for name in _FSDPState.__slots__:
        if name not in _NOT_COPIED:
            setattr(made, name, getattr(state, name))
    made.modules = tuple(_copy_module(module, memo) for module in state.modules)
    made.handle = _copy_handle(state.handle, made.modules, memo)
    made.precision = copy.deepcopy(state.precision, memo)
    install_grad_hooks(made)
    for top in state.modules:
        for module in walk.modules(top):
            if OWNERS.get(module) is state:
                OWNERS.set(made, _copy_module(module, memo))
        for _, _, below in walk_states(top):
            if below.parent is state:
                copy.deepcopy(below, memo)._parent = weakref.ref(made)
    return made


def _copy_module(module: nn.Module, memo: Memo) -> nn.Module:
    made = copy.deepcopy(module, memo)
    # One that is being copied right now has no attributes yet. Its dicts will
    # be these, which the memo knows.
    for table in ("_parameters", "_forward_pre_hooks"):
        if table not in vars(made):
            vars(made)[table] = copy.deepcopy(vars(module)[table], memo)
    return made


def _copy_handle(
    handle: FlatParamHandle, modules: tuple[nn.Module, ...], memo: Memo
) -> FlatParamHandle:
    target = Target(
        plan=handle.plan,
        modules=modules,
        members=(),
        parameters=tuple(
            tuple(copy.deepcopy(leaf, memo) for leaf in region.leaves)
            for region in handle.regions
        ),
        places=handle.places,
        keys=handle.keys,
        owners=tuple(_copy_module(owner, memo) for owner in handle.owners),
        parent=0,
        units_below=(),
    )
    made = build_handle(
        target,
        groups=handle.groups,
        device=handle.device,
        sharded=True,
        # Modules between may be half copied, and have no children yet.
        guarded=tuple(copy.deepcopy(hooks, memo) for hooks in handle.guards),
    )
    if handle.is_full:
        # Unsharded by hand: the copied modules show copies of the full leaves.
        views.use_sharded(made)
    made.rule = copy.copy(handle.rule)
    set_divisions(made)
    for old, new in zip(handle.regions, made.regions, strict=True):
        if old.flat is not None:
            # An optimizer that is copied as well, before or after, holds the same copy.
            rebind_flat_parameter(made, new, copy.deepcopy(old.flat, memo))
    memo[id(handle)] = made
    return made
