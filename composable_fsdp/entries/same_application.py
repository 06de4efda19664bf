"""``if_sharded="skip"``: compare a sharded module with the arguments of a new call."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.compute_device import resolve_device
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.compose.registry import get_state
from composable_fsdp.entries.apply import Application
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import quoted
from composable_fsdp.planning.options import in_force
from composable_fsdp.planning.places import API
from composable_fsdp.tree.state import _FSDPState


def is_same_application(modules: Sequence[nn.Module], application: Application) -> bool:
    """Return whether ``modules`` are a unit with the options of ``application``.

    Raises: CompositionError, naming the first difference.
    """
    state = get_state(modules[0], API) if modules else None
    if not isinstance(state, _FSDPState):
        return False
    found = _difference(modules, state, application)
    if found:
        raise CompositionError(
            f"fully_shard(if_sharded='skip') found {type(modules[0]).__name__} "
            f"{quoted(state.fqn)} sharded with other settings: {found}. Use the same "
            "settings, or a fresh module."
        )
    return True


def _difference(
    modules: Sequence[nn.Module], state: _FSDPState, application: Application
) -> str:
    """Describe the first difference from ``application``; empty if there is none."""
    if list(map(id, modules)) != list(map(id, state.modules)):
        return (
            f"it is one unit of {len(state.modules)} modules, this call asks for a "
            f"unit of {len(modules)}"
        )
    # By effect and not by spelling: a unit that a policy made was given no options.
    has, asked = in_force(state.options), in_force(application.request.options)
    for name, value in asked.items():
        if has[name] != value:
            return f"it has {name}={has[name]}, this call asks for {value}"
    here, there = _members(state.ranks), _members(application.ranks)
    if here != there:
        return f"it is over {here}, this call asks for {there}"
    # Without device_id any device is accepted: the parameters are on the device of the
    # earlier call already.
    if application.device_id is not None:
        device = resolve_device(application.device_id, application.ranks, ())
        if device != state.device:
            return f"it computes on {state.device}, this call asks for {device}"
    return ""


def _members(ranks: RankLayout) -> str:
    """Describe the ranks that a caller chose, in words."""
    named = (
        ("ranks", ranks.shard),
        ("copies on", ranks.replicate),
        ("other experts on", ranks.experts),
    )
    return ", ".join(
        f"{name} {sorted(dist.get_process_group_ranks(group))}"
        for name, group in named
        if group is not None
    )
