"""From planned targets to running units: buffers, states, hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count

import torch

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.compose.registry import set_state
from composable_fsdp.flat.build import build_handle
from composable_fsdp.planning.assign import API
from composable_fsdp.planning.planner import Target
from composable_fsdp.runtime import engine
from composable_fsdp.runtime.deepcopy import copy_state
from composable_fsdp.runtime.hooks import install_hooks
from composable_fsdp.tree.precision import make_precision
from composable_fsdp.tree.state import OWNERS, _FSDPState

_applications = count(1)
"""Of this process; a copied unit keeps its number."""


def build_units(
    targets: Sequence[Target],
    root_state: _FSDPState,
    *,
    ranks: RankLayout,
    device: torch.device,
    api: str = API,
    before: Callable[[int], None] | None = None,
) -> list[_FSDPState]:
    """Build every unit of one application, inner ones first; states in plan order.

    ``before`` is called with each target's index just before its unit is sharded.

    ``root_state`` is the one that the registry made for the first target; the others
    are made and registered here. All checks are done; sends nothing.
    """
    engine.install()
    states = [root_state, *(_FSDPState() for _ in targets[1:])]
    application = next(_applications)
    for index in reversed(range(len(targets))):
        target, state = targets[index], states[index]
        if before is not None:
            before(index)
        _fill(state, target, ranks, device)
        state.application = application
        if state is not root_state:
            set_state(target.modules[0], api, state)
            _link(state, states[target.parent])
        for below in target.units_below:
            if isinstance(below, _FSDPState) and below.parent is None:
                _link(below, state)
        # Inner units have entered theirs, and a module has one owner.
        heads = target.modules
        free = [m for m in target.members if m in heads or OWNERS.get(m) is None]
        OWNERS.set(state, *free)
        install_hooks(state)
    return states


def _link(child: _FSDPState, parent: _FSDPState) -> None:
    """Tell a unit which unit holds it. Weakly: it does not keep its parent alive."""
    child._parent = weakref.ref(parent)


def _fill(
    state: _FSDPState, target: Target, ranks: RankLayout, device: torch.device
) -> None:
    options = target.plan.options
    state.modules = target.modules
    state.fqn = target.plan.fqn
    state.options = options
    state.ranks, state.device = ranks, device
    state.copier = copy_state
    state.reshard_after_forward = None if options.reshard_after_forward else False
    state.prefetches_forward = options.forward_prefetch
    groups = ranks.for_strategy(options.strategy)
    state.handle = build_handle(target, groups=groups, device=device)
    state.precision = make_precision(state.handle)
