"""Public entry point ``forecast``: the memory of a rank and the traffic of a step."""

from __future__ import annotations

from composable_fsdp.tools.memory import (
    Activations,
    OptimizerMemory,
    optimizer_memory,
)
from composable_fsdp.tools.sharding_plan import Forecast, ShardingPlan


def forecast(
    plan: ShardingPlan,
    *,
    optimizer: str | float | OptimizerMemory = "adamw",
    activations: Activations | None = None,
    device_type: str = "cuda",
) -> Forecast:
    """Return the memory of a rank and the traffic of a step, with an optimizer.

    Args:
        plan: the result of ``plan()``.
        optimizer: a name ("adamw", the default; "adamw-fused", "adam", "adam-fused",
            "sgd", "sgd-momentum", "none"), or the bytes that the optimizer keeps per
            element of a parameter.
        activations: the result of ``measure_activations``, whose forward also gives the
            order of the units. Default None: left out.
        device_type: "cuda" (default) or "cpu", as in ``ShardingPlan.peak``.

    Returns: the forecast; ``total`` is the bytes at the peak.
    Raises: PlanError, if ``optimizer`` is unknown.

    >>> import torch
    >>> from composable_fsdp import plan
    >>> planned = plan(torch.nn.Linear(8, 8, bias=False), world_size=4)
    >>> forecast(planned, optimizer="adamw-fused").rows[0].optimizer
    128
    """
    # A measured forward shows the order of the units; a plan alone has to guess it.
    if activations is not None:
        plan = plan.in_forward_order(activations.order)
    return Forecast(plan, optimizer_memory(optimizer), activations, device_type)
