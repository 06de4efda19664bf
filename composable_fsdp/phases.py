"""The phases of a unit, and which may follow which.

::

    IDLE ----> FORWARD ----> IDLE                      no gradient needed
      |           '--------> BACKWARD_PRE                weights kept until backward
      |----> BACKWARD_PRE ----> BACKWARD_POST ----> IDLE
      '----> SUMMON ----> IDLE                           outside the step

Recomputation runs a forward inside backward without leaving the backward phase.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a handle stands in the step."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD_PRE = "backward, gradients to come"
    BACKWARD_POST = "backward, gradients reduced"
    SUMMON = "unshard_params"
