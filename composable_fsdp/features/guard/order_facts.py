"""Facts: actions of a rank, in the form in which ranks compare and tell them.

A fact is a use of a unit, or the begin or the end of a round of an order log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from composable_fsdp.comm.operations import UNEVEN
from composable_fsdp.naming import listed, quoted

REDUCE = "reduce"
"""Action of a fact: the unit reduces its gradients."""

AFTER_RAISE = "begin after a raise"
"""Action of a fact: a round begins after rounds that an exception has ended."""

RAN = "ran"
"""Action of a fact: the uses of a whole round."""

_SAME_UNITS = (
    "Every rank must run the same units in the same order: decide in the model by what "
    "is equal on all ranks. If ranks use other parameters on purpose, composable_fsdp."
    "access.set_reduce_scatter_unused_params(module, True) reduces zeros for the rest."
)
SAME_CALLS = (
    "Call the model and backward on every rank equally often and in the same mode "
    "(train or eval, with or without gradients), outside of any 'if rank == 0'. "
    f"{UNEVEN}"
)
_SAME_FROZEN = (
    "Set requires_grad of the same parameters on every rank, and turn reductions off "
    "(no_sync, set_requires_gradient_sync) on every rank or on none."
)
_SAME_SETTINGS = (
    "Change settings of units (set_reshard_after_forward, register_comm_hook, ..) on "
    "every rank, to the same values and before the same forward."
)
_ONE_RANK_RAISED = (
    "If a rank catches an exception of a forward or a backward and goes on, every rank "
    "has to leave the same forward or backward at the same place: let the ranks agree "
    "(an all-reduce of a flag) whether a sample is skipped before they call the model, "
    "or let the exception end the program."
)


class Fact(NamedTuple):
    """An action of a rank, in the form in which ranks send and compare actions."""

    action: str
    """Name of the action. The begin and the end of a round are actions, too."""
    unit: str = ""
    """The unit, or the module whose forward begins; empty if there is neither."""
    details: tuple[str | int, ...] = ()
    """Further values that have to be equal on all ranks."""
    named: tuple[str, ...] = ()
    """Texts of which usually few differ: parameters without a gradient; at the begin of
    a round, flags and settings that were changed since the first."""

    @classmethod
    def of(cls, value: Sequence[Any]) -> Fact:
        """Return the fact that JSON has turned into the list ``value``."""
        action, unit, details, named = value
        return cls(action, unit, tuple(details), tuple(named))


def flag_text(name: str, trains: bool) -> str:
    """Return the entry of ``Fact.named`` for a parameter frozen or unfrozen."""
    return f"requires_grad={trains} of {quoted(name)}"


def way_out(mine: Fact, theirs: Fact) -> str:
    """Return the last sentences of a ``DesyncError``: the way to equal facts.

    >>> begins = Fact("begin forward", "(root)", ("training", "with"))
    >>> way_out(begins, begins._replace(details=("eval", "without")))[:41]
    'Call the model and backward on every rank'
    """
    if AFTER_RAISE in (mine.action, theirs.action):
        return _ONE_RANK_RAISED
    if not (mine.action.startswith("begin") or theirs.action.startswith("begin")):
        return _SAME_UNITS
    apart = set(mine.named) ^ set(theirs.named)
    if not all(each.startswith("requires_grad=") for each in apart):
        return _SAME_SETTINGS
    # The begin of a backward names the mode of its forward first. Without all-gathers,
    # only the frozen parameters tell two backwards apart.
    is_same_call = mine[:2] == theirs[:2] and mine.details[:2] == theirs.details[:2]
    return _SAME_FROZEN if is_same_call or apart else SAME_CALLS


Waiting = Mapping[str, Sequence[str]]
"""Units that wait for gradients, each with the parameters that lack a gradient."""


def contrast(mine: Fact, theirs: Fact) -> tuple[Fact, Fact]:
    """Reduce the texts in two facts to those that only one of them has.

    >>> mine, theirs = contrast(
    ...     Fact(REDUCE, "a", named=("x", "y")), Fact(REDUCE, "a", named=("y",))
    ... )
    >>> mine.named, theirs.named
    (('x',), ())
    """
    here, there = set(mine.named), set(theirs.named)
    return (
        mine._replace(named=tuple(n for n in mine.named if n not in there)),
        theirs._replace(named=tuple(n for n in theirs.named if n not in here)),
    )


def waiting_text(waiting: Waiting, fact: Fact) -> str:
    """Return why a rank does not send the reduction ``fact``: missing gradients.

    >>> waiting_text({"'a'": ["a.x"]}, Fact(REDUCE, "'a'"))
    " and has no gradient yet for 'a.x'"
    """
    if fact.action != REDUCE or fact.unit not in waiting:
        return ""
    return f" and has no gradient yet for {listed(map(quoted, waiting[fact.unit]))}"
