"""``copy.deepcopy`` of a sharded model: new shards, the same process groups."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

from composable_fsdp.flat import residency
from composable_fsdp.flat.build import build_handle
from composable_fsdp.flat.flat_parameter import rebind_flat_parameter
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.planning import walk
from composable_fsdp.planning.planner import Target
from composable_fsdp.runtime.grad_hooks import install_grad_hooks
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.tree.state import OWNERS, _FSDPState
from composable_fsdp.tree.traversal import walk_states

Memo = dict[int, Any]


def copy_state(state: _FSDPState, memo: Memo) -> _FSDPState:
    """Return the state of a copied unit, with new shards."""
    require_between_steps(state, "copy.deepcopy")
    made = _FSDPState()
    # Before all else: the modules below refer back to this state.
    memo[id(state)] = made
    modules = tuple(_copy_module(module, memo) for module in state.modules)
    handle = _copy_handle(state.handle, modules, memo)
    made.fill(
        state.fqn,
        modules,
        handle,
        copy.deepcopy(state.precision, memo),
        options=state.options,
        ranks=state.ranks,
        initial=state.initial.copy(state.handle.layout, handle.layout),
        settings=copy.copy(state.settings),
    )
    made.searches.writes_data = state.searches.writes_data
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
    """Return the copy of ``module``, with the dicts that the unit needs."""
    made = copy.deepcopy(module, memo)
    # A module whose copy is in progress has no attributes yet. The dicts set here are
    # the dicts that the copy will get, because ``memo`` knows them.
    for table in ("_parameters", "_forward_pre_hooks"):
        if table not in vars(made):
            vars(made)[table] = copy.deepcopy(vars(module)[table], memo)
    return made


def _copy_handle(
    handle: FlatParamHandle, modules: tuple[nn.Module, ...], memo: Memo
) -> FlatParamHandle:
    """Build a handle over copies of the sharded parameters."""
    target = Target(
        plan=handle.layout.plan,
        modules=modules,
        parameters=tuple(
            tuple(copy.deepcopy(leaf, memo) for leaf in region.leaves)
            for region in handle.layout.regions
        ),
        places=handle.layout.places,
        owners=tuple(_copy_module(owner, memo) for owner in handle.layout.owners),
    )
    made = build_handle(
        target,
        groups=handle.groups,
        device=handle.layout.device,
        sharded=True,
        rule=copy.copy(handle.rule),
        # Modules below may be partly copied and have no children yet.
        guarded=tuple(copy.deepcopy(hooks, memo) for hooks in handle.guards),
        # The same meshes: the ranks of a copy are those of the model.
        forms=handle.layout.forms,
    )
    if handle.is_full:
        # The user has unsharded the unit, so the copied modules show copies of full
        # parameters.
        residency.use_sharded(made)
    for old, new in zip(handle.layout.regions, made.layout.regions, strict=True):
        if old.flat is not None:
            # An optimizer that is copied together with the model, before or after,
            # refers to the same copy through ``memo``.
            rebind_flat_parameter(made, new, copy.deepcopy(old.flat, memo))
    memo[id(handle)] = made
    return made
