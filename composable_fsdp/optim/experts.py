"""Optimizer state of experts that are plain parameters, different on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from composable_fsdp.comm import collectives
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.optim.names import Named
from composable_fsdp.state_dict.other_experts import (
    expert_units,
    from_all_ranks,
    require_own_names,
)


def with_all_experts(
    saved: dict[str, Any],
    members: Sequence[Named],
    handles: Iterable[FlatParamHandle],
    *,
    to_cpu: bool,
) -> dict[str, Any]:
    """Return full state with the state of the experts of all ranks.

    Collective, Raises: over each ``expert_mesh`` as ``from_all_ranks``.
    """
    handles = list(handles)
    for group, units in expert_units(handles).items():
        # Taken out, so that the experts of all ranks have one order on all ranks.
        own = {
            name: saved["state"].pop(name)
            for name in _names(members, units)
            if name in saved["state"]
        }
        # Units of a tree have one compute device, from which the backend sends.
        device = units[0].layout.device
        saved["state"] |= from_all_ranks(own, group, device, to_cpu=to_cpu)
    return with_expert_names(saved, members, handles)


def with_expert_names(
    saved: dict[str, Any], members: Sequence[Named], handles: Iterable[FlatParamHandle]
) -> dict[str, Any]:
    """Return a state dict whose groups name the experts of all ranks.

    Collective, Raises: over each ``expert_mesh`` as ``require_own_names``.
    """
    for group, units in expert_units(handles).items():
        own = set(_names(members, units))
        require_own_names(own, group)
        # A file has one list per group, and the plain model needs all names in it.
        told = collectives.all_gather_object(
            [[n for n in each["params"] if n in own] for each in saved["param_groups"]],
            group,
        )
        # The groups of all ranks are alike but for the experts in them. The order is
        # that of no rank: DCP joins the entries of the lists that ranks save.
        for number, each in enumerate(saved["param_groups"]):
            more = [n for groups in told for n in groups[number : number + 1]]
            common = [name for name in each["params"] if name not in own]
            each["params"] = [*common, *(name for part in more for name in part)]
            # Names that this rank's optimizer was made with, in its own order.
            each.pop("param_names", None)
    return saved


def without_other_experts(
    saved: Any, model: nn.Module, handles: Iterable[FlatParamHandle]
) -> Any:
    """Return a saved state without the experts that other ranks hold.

    Collective, Raises: over each ``expert_mesh`` as ``require_own_names``.
    """
    others: set[str] = set()
    for group, units in expert_units(handles).items():
        own = [
            strip_wrapper(name)
            for name, parameter in model.named_parameters()
            if (found := find_leaf(parameter)) is not None and found[0] in units
        ]
        others.update(require_own_names(own, group))
    if not others or not isinstance(saved, dict):
        return saved
    state, groups = saved.get("state"), saved.get("param_groups")
    # Another form is refused later, with the text for this form.
    if not isinstance(state, dict) or not isinstance(groups, list):
        return saved
    # New dicts: the caller may load the same state into another optimizer.
    kept = {key: value for key, value in state.items() if key not in others}
    left = [
        {**each, "params": [key for key in each["params"] if key not in others]}
        for each in groups
    ]
    return {**saved, "state": kept, "param_groups": left}


def _names(members: Sequence[Named], units: Sequence[FlatParamHandle]) -> list[str]:
    """Return the names of the parameters of ``units``."""
    return [each.fqn for each in members if each.handle in units]
