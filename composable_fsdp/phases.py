"""The phases of a unit, in the order in which a step goes through them.

::

    IDLE ----> FORWARD ----> IDLE                      no gradient needed
      |           '--------> BACKWARD_PRE                weights kept until backward
      |----> BACKWARD_PRE ----> BACKWARD_POST ----> IDLE
      '----> SUMMON ----> IDLE                           outside the step

Recomputation runs a forward inside backward without leaving the backward phase. A unit
whose outputs do not contribute to the loss stays in BACKWARD_PRE until the unit's next
forward. The runtime sets the phase and does not check the order. State dicts, optimizer
checks and ``unshard_params`` read SUMMON; the other phases are for messages and tests.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The phase of a handle in the step."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD_PRE = "backward, gradients to come"
    BACKWARD_POST = "backward, gradients reduced"
    SUMMON = "unshard_params"
