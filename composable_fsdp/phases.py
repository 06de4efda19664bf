"""The state machines of a unit: its phase in the step, and where its parameters are.

A move of ``Residency`` that the table does not list raises (``illegal_move``). Of
``Phase`` the step checks nothing; functions outside of a step refuse by it.
"""

from __future__ import annotations

from enum import Enum

from composable_fsdp.errors import PhaseError


class Phase(Enum):
    """The phase of a unit in the step.

    ::

        IDLE ----> FORWARD ----> IDLE                      no gradient needed
          |           '--------> BACKWARD_PRE              backward will need the unit
          |----> BACKWARD_PRE ----> BACKWARD_POST ----> IDLE
          '----> SUMMON ----> IDLE                         outside the step

    A unit whose outputs do not contribute to the loss stays in BACKWARD_PRE until the
    unit's next forward, or until the tree is between steps. A backward may run inside a
    forward of the unit, and then ends in FORWARD. Recomputation runs a forward inside
    backward without leaving the phase of the backward.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD_PRE = "backward, gradients to come"
    BACKWARD_POST = "backward, gradients reduced"
    SUMMON = "unshard_params"


IDLE, FORWARD, BACKWARD_PRE, BACKWARD_POST, SUMMON = Phase


class Residency(Enum):
    """Where the full parameters of a unit are; ``flat.residency`` makes the moves."""

    SHARDED = "sharded"
    """The modules show the sharded parameters. The full buffers have no memory, or
    memory that the next all-gather overwrites."""
    GATHERING = "gathering"
    """An all-gather fills the full buffers; the modules show the sharded parameters."""
    UNSHARDED = "unsharded"
    """The modules show the full parameters."""
    HIDDEN = "hidden"
    """The full buffers are filled; the modules show the sharded parameters."""
    FREE_PENDING = "free pending"
    """The GPU may still read the full buffers, which are freed later."""
    COPIES_SHOWN = "copies shown"
    """``unshard_params`` shows full parameters over buffers of its own."""

    followers: tuple[Residency, ...]
    """The states that may follow."""


def _set_followers() -> None:
    sharded, gathering, unsharded, hidden, free_pending, copies = Residency
    sharded.followers = gathering, hidden, copies
    gathering.followers = unsharded, sharded, free_pending
    unsharded.followers = (hidden,)
    hidden.followers = unsharded, sharded, free_pending
    free_pending.followers = (sharded,)
    copies.followers = (sharded,)


_set_followers()


def illegal_move(name: str, now: Residency, then: Residency) -> PhaseError:
    """Return the error for a move that the table of ``now`` does not list."""
    legal = ", ".join(state.name for state in now.followers)
    return PhaseError(
        f"Fully sharded module {name} is {now.name} ({now.value}) and cannot become "
        f"{then.name} ({then.value}); expected {legal}. This is an error inside "
        "composable_fsdp, or its internal functions were called out of order. Please "
        "report it with the calls that led here."
    )
