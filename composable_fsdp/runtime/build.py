"""Construction of units from planned targets: buffers, states and hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist

from composable_fsdp.comm.groups import PEERLESS, Groups, RankLayout
from composable_fsdp.comm.meshes import groups_for
from composable_fsdp.compose.registry import set_state
from composable_fsdp.flat.build import build_handle
from composable_fsdp.flat.param_form import NO_FORMS
from composable_fsdp.flat.param_ref import record_replaced
from composable_fsdp.flat.value_hash import hash_values, have_values
from composable_fsdp.planning.planner import Target
from composable_fsdp.runtime.forward import install_hooks
from composable_fsdp.tree.moments import FORMS_TAKEN, UNIT_BUILT
from composable_fsdp.tree.state import (
    OWNERS,
    InitialWeights,
    UnitSettings,
    _FSDPState,
    in_slot_order,
    make_precision,
)


def build_units(
    targets: Sequence[Target],
    root_state: _FSDPState,
    *,
    ranks: RankLayout,
    device: torch.device,
    before: Callable[[int], None] | None,
    awaiting: Container[int],
    synced: bool,
    api: str,
) -> list[_FSDPState]:
    """Build every unit of a call of ``fully_shard``; the states, as ``targets``."""
    states = [root_state, *(_FSDPState() for _ in targets[1:])]
    # Nested units first: each unit takes its modules, and outer units take only modules
    # without an owner.
    for index in reversed(range(len(targets))):
        target, state = targets[index], states[index]
        if before is not None:
            before(index)
        groups = groups_for(ranks, target.plan.options.chosen)
        # The flat buffers hold plain tensors; forms know how compute sees each.
        given = target.parameters
        forms = NO_FORMS
        # A loop, because ``all`` of a generator would cost calls in every unit.
        for layout in target.plan.regions:
            if not layout.is_plain:
                for take in FORMS_TAKEN:
                    target, forms = take(target)
                break
        # Hashed while this rank still has whole values.
        initial = _hash_weights(target, groups, synced=synced)
        initial.awaits_buffers = index in awaiting
        handle = build_handle(target, groups=groups, device=device, forms=forms)
        if forms:
            # An optimizer that was made before holds the DTensors.
            record_replaced(handle, given, target.parameters)
        if not handle.layout.on_meta:
            initial.mark(handle.layout)
        first = state is root_state
        options = target.plan.options
        state.fill(
            target.plan.fqn,
            target.modules,
            handle,
            make_precision(handle, is_local_root=first),
            options=options,
            ranks=ranks,
            initial=initial,
            settings=UnitSettings(
                None if target.plan.reshards else False,
                prefetches_forward=options.forward_prefetch,
                reshard_after_backward=not target.plan.stays_full,
            ),
        )
        if not first:
            set_state(target.modules[0], api, state)
            # Weak: a unit must not keep the units above alive.
            state._parent = weakref.ref(states[target.parent])
        for below in target.units_below:
            if isinstance(below, _FSDPState) and below.parent is None:
                below._parent = weakref.ref(state)
        # Nested units were built first and own their modules already.
        owned = OWNERS.without_owner(target.members)
        OWNERS.set(state, *owned)
        install_hooks(state)
        for built in UNIT_BUILT:
            built(state, owned)
    return states


def _hash_weights(target: Target, groups: Groups, *, synced: bool) -> InitialWeights:
    """Hash the whole values of a unit, before the unit is sharded."""
    # Outside of the unit's groups, other ranks may hold other parts of the model.
    has_others = groups.has_peers or (
        dist.get_world_size() > 1 and dist.get_backend() not in PEERLESS
    )
    is_checked = target.plan.options.check_weights != "off" and has_others
    hashes = None
    # Without other ranks nothing is hashed: tensors may be fake then.
    if is_checked and groups.has_peers and not synced and groups.shard_ref is not None:
        values = in_slot_order(target.plan.regions, target.parameters)
        if have_values(values):
            hashes = hash_values(values)
    return InitialWeights(is_checked=is_checked, hashes=hashes, synced=synced)
