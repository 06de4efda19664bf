"""The phases of a unit, in the order in which a step goes through them.

::

    IDLE ----> FORWARD ----> IDLE                      no gradient needed
      |           '--------> BACKWARD_PRE                weights kept until backward
      |----> BACKWARD_PRE ----> BACKWARD_POST ----> IDLE
      '----> SUMMON ----> IDLE                           outside the step

Recomputation runs a forward inside backward without leaving the backward phase. A unit
whose outputs the loss does not reach stays in BACKWARD_PRE until its next forward. The
runtime sets the phase and does not check which one it follows. State dicts, optimizer
checks and ``unshard_params`` read SUMMON; the other phases are for messages and tests.
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
