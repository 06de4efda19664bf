"""Slots for the units of a tree, as its plan says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_fsdp.comm.registered_memory import RegisteredMemory
from composable_fsdp.config import Arena
from composable_fsdp.features.arena.slot import Slot, Slots
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of

_Key = tuple[Arena, torch.device]


def give_slots(context: RuntimeContext) -> None:
    """Give each unit with an arena its slots; the first all-gather allocates them."""
    # In forward order, so that slots are made in the same order on all ranks.
    members: dict[_Key, list[_FSDPState]] = {}
    states = root_of(context)._root_states
    for state in states:
        if state.options.arena is not None:
            key = state.options.arena, state.handle.layout.device
            members.setdefault(key, []).append(state)
    if not members:
        return
    # Here, so that a program without an arena loads nothing of the tools.
    from composable_fsdp.tools.plan_in_force import plan_of_units

    arenas = {key: Slots(*key, _source(*key, found)) for key, found in members.items()}
    plan = plan_of_units([(state.fqn, state) for state in states])
    kind = "cpu" if context.streams.host_waits else "cuda"
    planned = plan.step_memory(device_type=kind)
    for slot in planned.slots:
        # The plan knows no devices; units on several share nothing.
        made: dict[_Key, Slot] = {}
        for index in slot.units:
            handle, option = states[index].handle, states[index].options.arena
            assert option is not None
            key = option, handle.layout.device
            if handle.form.needs_gather:
                if key not in made:
                    made[key] = arenas[key].add(slot.nbytes)
                handle.form.slot = made[key]
    for option, nbytes in planned.reduce_slots:
        for key, found in members.items():
            if key[0] == option:
                reductions = arenas[key].add(nbytes)
                for state in found:
                    state.handle.reduction.slot = reductions


def _source(
    option: Arena, device: torch.device, states: Sequence[_FSDPState]
) -> RegisteredMemory | None:
    """Return where the memory of the units' arena comes from, if not from torch."""
    if option.comm_memory is None:
        return None
    # Units over the same ranks share a group, which registers once.
    refs = [state.handle.groups.shard_ref for state in states]
    groups = {ref.get().group_name: ref for ref in refs if ref is not None}
    return RegisteredMemory(device, tuple(groups.values()))
