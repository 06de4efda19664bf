"""Planning, simulation and reports: names beside those of ``composable_fsdp``."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import public_names

if TYPE_CHECKING:
    from composable_fsdp.tools.activations import (
        measure_activations as measure_activations,
    )
    from composable_fsdp.tools.describe import Description as Description
    from composable_fsdp.tools.machine import MACHINES as MACHINES
    from composable_fsdp.tools.machine import Machine as Machine
    from composable_fsdp.tools.memory import Activations as Activations
    from composable_fsdp.tools.plan import replan as replan
    from composable_fsdp.tools.sharding_plan import Forecast as Forecast
    from composable_fsdp.tools.simulate import Simulation as Simulation
    from composable_fsdp.tools.step_time import StepTime as StepTime

__all__ = public_names(__name__)
