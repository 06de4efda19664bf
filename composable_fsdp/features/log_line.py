"""The line that is logged at the first step of a tree: its units and their memory."""

from __future__ import annotations

import logging

import torch.distributed as dist

from composable_fsdp.comm.placements import name_of
from composable_fsdp.naming import size_text
from composable_fsdp.tree.state import RuntimeContext, root_of

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
