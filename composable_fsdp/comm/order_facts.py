"""Facts: actions of a rank, in the form in which ranks compare and tell it.

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
    "Every rank must run the same units in the same order: take decisions in the model "
    "from what is equal on all ranks. If ranks use different parameters on purpose, "
    "set_reduce_scatter_unused_params(module, True) reduces zeros for the unused ones."
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


class Fact(NamedTuple):
    """An action of a rank, in the form in which ranks send and compare actions."""

    action: str
    """Name of the action. The begin and the end of a round are actions, too."""
    unit: str = ""
    """The unit, or the module whose forward begins; empty if there is neither."""
    details: tuple[str | int, ...] = ()
    """Further values that have to be equal on all ranks."""
    missing: tuple[str, ...] = ()
    """If the action is ``REDUCE``: the parameters without a gradient."""
    frozen: tuple[str, ...] = ()
    """At the begin of a round: parameters frozen since ``fully_shard``."""
    unfrozen: tuple[str, ...] = ()
    """At the begin of a round: parameters unfrozen since ``fully_shard``."""
    settings: tuple[str, ...] = ()
    """At the begin of a round: settings of units changed since the first."""

    @classmethod
    def of(cls, value: Sequence[Any]) -> Fact:
        """Return the fact that JSON has turned into the list ``value``."""
        action, unit, *names = value
        return cls(action, unit, *map(tuple, names))

    @property
    def trains(self) -> dict[str, bool]:
        """The new ``requires_grad`` of the parameters frozen or unfrozen."""
        return dict.fromkeys(self.frozen, False) | dict.fromkeys(self.unfrozen, True)


def way_out(mine: Fact, theirs: Fact) -> str:
    """Return the last sentences of a ``DesyncError``: the way to equal facts.

    >>> begins = Fact("begin forward", "(root)", ("training", "with"))
    >>> way_out(begins, begins._replace(details=("eval", "without")))[:41]
    'Call the model and backward on every rank'
    """
    if not (mine.action.startswith("begin") or theirs.action.startswith("begin")):
        return _SAME_UNITS
    if mine.settings != theirs.settings:
        return _SAME_SETTINGS
    # The begin of a backward names the mode of its forward first.
    is_same_call = mine[:2] == theirs[:2] and mine.details[:2] == theirs.details[:2]
    # Without all-gathers, only the frozen parameters tell two backwards apart.
    is_frozen = mine.trains != theirs.trains
    return _SAME_FROZEN if is_same_call or is_frozen else SAME_CALLS


Note = Mapping[str, Sequence[str]]
"""Units that wait for gradients, each with the parameters that lack a gradient."""


def contrast(mine: Fact, theirs: Fact) -> tuple[Fact, Fact]:
    """Reduce the parameters in two facts to those that show the difference.

    A parameter that a rank has frozen trains on the other rank, which names that
    parameter, too.

    >>> mine, theirs = contrast(
    ...     Fact(REDUCE, "a", missing=("x", "y")), Fact(REDUCE, "a", missing=("y",))
    ... )
    >>> mine.missing, theirs.missing
    (('x',), ())
    >>> mine, theirs = contrast(Fact("begin", frozen=("x", "y")), Fact("begin"))
    >>> mine.frozen, theirs.unfrozen
    (('x', 'y'), ('x', 'y'))
    """
    here, there = mine.trains, theirs.trains
    if here != there:
        # A parameter that only one rank names has the opposite value on the other.
        here = {name: not trains for name, trains in there.items()} | here
        there = {name: not trains for name, trains in here.items()} | there
        names = [name for name in here if here[name] is not there[name]]
        mine, theirs = _naming(mine, names, here), _naming(theirs, names, there)
    if mine.settings != theirs.settings:
        # Only what a rank alone has: a tree may have thousands of settings.
        here_only, there_only = (
            tuple(each for each in one.settings if each not in set(other.settings))
            for one, other in ((mine, theirs), (theirs, mine))
        )
        mine = mine._replace(settings=here_only)
        theirs = theirs._replace(settings=there_only)
    # Different units or actions: the facts differ before the parameters.
    if mine._replace(missing=()) != theirs._replace(missing=()):
        return mine, theirs
    return _without(mine, theirs.missing), _without(theirs, mine.missing)


def _naming(fact: Fact, names: Sequence[str], trains: Mapping[str, bool]) -> Fact:
    """Return ``fact`` with the flags of the parameters ``names`` only."""
    return fact._replace(
        frozen=tuple(name for name in names if not trains[name]),
        unfrozen=tuple(name for name in names if trains[name]),
    )


def _without(fact: Fact, names: Sequence[str]) -> Fact:
    """Return ``fact`` without the missing parameters ``names``."""
    left = tuple(name for name in fact.missing if name not in names)
    return fact._replace(missing=left)


def waiting(note: Note, fact: Fact) -> str:
    """Return why a rank does not send the reduction ``fact``: missing gradients.

    >>> waiting({"'a'": ["a.x"]}, Fact(REDUCE, "'a'"))
    " and has no gradient yet for 'a.x'"
    """
    if fact.action != REDUCE or fact.unit not in note:
        return ""
    return f" and has no gradient yet for {listed(map(quoted, note[fact.unit]))}"
