"""Public entry point ``forecast``: the memory of a rank and the traffic of a step."""

from __future__ import annotations

from composable_fsdp.config import DeviceType
from composable_fsdp.errors import PlanError
from composable_fsdp.tools.memory import OPTIMIZERS, Activations, OptimizerMemory
from composable_fsdp.tools.sharding_plan import Forecast, ShardingPlan


def optimizer_memory(given: str | float | OptimizerMemory) -> OptimizerMemory:
    """Return the memory of an optimizer by name, or by bytes per element, as text too.

    Raises: PlanError, if ``given`` is neither.

    >>> optimizer_memory("adamw").states, optimizer_memory(2.5).bytes_per_element
    (2, 2.5)
    """
    if isinstance(given, OptimizerMemory):
        return given
    if isinstance(given, str) and given.lower() in OPTIMIZERS:
        return OPTIMIZERS[given.lower()]
    # The command line passes numbers as text.
    try:
        size = float(given)
    except (TypeError, ValueError):
        size = -1.0
    # Neither NaN nor infinity is a size.
    if not 0 <= size < 1e6:
        raise PlanError(
            f"optimizer expects one of {', '.join(OPTIMIZERS)}, or the bytes that the "
            f"optimizer keeps per element of a parameter, such as 2; got {given!r}."
        )
    return OptimizerMemory(f"{size:g} bytes per element", bytes_per_element=size)


def forecast(
    plan: ShardingPlan,
    *,
    optimizer: str | float | OptimizerMemory = "adamw",
    activations: Activations | None = None,
    device_type: DeviceType = "cuda",
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
