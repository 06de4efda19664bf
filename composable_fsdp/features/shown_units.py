"""``print(model)``, and a line in the log, show which modules are sharded."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.placements import name_of
from composable_fsdp.naming import size_text
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of


def show_units(state: _FSDPState, members: Iterable[nn.Module]) -> None:
    """Have ``print`` show the unit at each of its modules."""
    for index, module in enumerate(state.modules):
        # Not ``setattr``, which a class may override.
        own = vars(module).get("extra_repr")
        vars(module)["extra_repr"] = partial(_extra_repr, state, index, own)


def _extra_repr(state: _FSDPState, index: int, own: Any) -> str:
    """Return the module's own line, and the line of the unit."""
    module = state.modules[index]
    before = own() if own is not None else type(module).extra_repr(module)
    # A module without children is printed on a single line.
    between = "\n" if any(module._modules.values()) or "\n" in before else ", "
    return between.join(filter(None, (before, _line(state, index))))


def _line(state: _FSDPState, index: int) -> str:
    """Return the line of the unit, for example "fully sharded over 8 ranks: ..."."""
    plan = state.handle.layout.plan
    ranks = plan.shard_world_size
    replicas = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
    # NO_SHARD and ``replicate`` keep whole parameters on each rank.
    over = f"sharded over {ranks} ranks{replicas}"
    if ranks == 1:
        over = f"replicated over {plan.replicas} ranks" if replicas else "of 1 rank"
    # The first module of a list stands for the unit, so that sums are printed once.
    if index:
        return f"unit {over}, with the {type(state.module).__name__} named {state.name}"
    numel = sum(region.numel for region in plan.regions)
    trained = sum(region.numel for region in plan.regions if region.trainable)
    frozen = f", {numel - trained:,} frozen" if trained < numel else ""
    # The shown module may also be full at the moment, inside ``unshard_params``.
    full = ", full now" if state.handle.is_full and ranks > 1 else ""
    return (
        f"unit {over}: {numel:,} parameters{frozen}, "
        f"{size_text(plan.parameter_bytes)} per rank{full}"
    )


LOGGER = logging.getLogger("composable_fsdp")
"""Level INFO on rank 0 and DEBUG on the other ranks, so that a job logs a line once."""


def log_units(context: RuntimeContext) -> None:
    """Log the units of a tree, their bytes on this rank, and the peak of a step."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    level = logging.INFO if is_first else logging.DEBUG
    # A plan of a thousand units takes milliseconds to add up.
    if not LOGGER.isEnabledFor(level):
        return
    # Here, so that a program without the line loads nothing of the tools.
    from composable_fsdp.tools.plan import plan_of_units

    root = root_of(context)
    plan = plan_of_units((state.fqn, state) for state in root._root_states)
    peak = plan.peak(device_type=root.device.type)
    # The units of one tree may have several strategies; a dict keeps their order.
    strategies = {name_of(unit.options.chosen): None for unit in plan.units}
    LOGGER.log(
        level,
        "%d unit%s, %s parameters over %d rank%s (%s), per rank: parameters %s, "
        "gradients %s, peak of a training step %s in %s, without activations and "
        "optimizer states",
        len(plan.units),
        "" if len(plan.units) == 1 else "s",
        f"{plan.numel:,}",
        plan.world_size,
        "" if plan.world_size == 1 else "s",
        ", ".join(strategies),
        size_text(plan.parameter_bytes),
        size_text(plan.gradient_bytes),
        size_text(peak.total),
        peak.when,
    )
