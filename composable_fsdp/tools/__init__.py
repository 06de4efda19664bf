"""Planning, simulation and reports: names beside those of ``composable_fsdp``."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import resolver

if TYPE_CHECKING:
    from composable_fsdp.tools.activations import (
        measure_activations as measure_activations,
    )
    from composable_fsdp.tools.describe import Description as Description
    from composable_fsdp.tools.memory import Activations as Activations
    from composable_fsdp.tools.sharding_plan import Forecast as Forecast
    from composable_fsdp.tools.simulated_clock import Machine as Machine
    from composable_fsdp.tools.simulation import Simulation as Simulation

_resolve, __all__ = resolver(
    {
        "tools.activations": "measure_activations",
        "tools.describe": "Description",
        "tools.memory": "Activations",
        "tools.sharding_plan": "Forecast",
        "tools.simulated_clock": "Machine",
        "tools.simulation": "Simulation",
    }
)
if not TYPE_CHECKING:
    __getattr__ = _resolve
