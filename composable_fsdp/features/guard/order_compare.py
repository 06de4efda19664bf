"""Comparison of an order log with the logs of the other ranks.

Ranks that issue collectives in different orders deadlock or exchange wrong data. A
``DesyncError`` names both orders before that happens::

    compare         all ranks exchange a tag by an all-gather of 8 bytes; only if tags
                    differ, they exchange the facts behind them
    depart          this rank alone leaves the record: it meets the other ranks in the
                    store (``meetings``), who must have departed to the same use
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import Peers
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.meeting import Announcement
from composable_fsdp.comm.operations import UNEVEN, leave
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.compare import disagreement, gather, tag_of
from composable_fsdp.features.guard.meetings import history_of
from composable_fsdp.features.guard.watch import require_unbroken
from composable_fsdp.naming import listed

BEGIN, END = "its beginning", "its end"
"""Places in a round; uses are between them."""

USE, BEGINS, RAISED, RAN = "use", "begins", "raised", "ran"
"""Kinds of facts: a use of a unit, the begin of a round, the begin after rounds that an
exception has ended, and all uses of a round."""

_SAME_UNITS = (
    "Every rank must run the same units in the same order: decide in the model by what "
    "is equal on all ranks. If ranks use other parameters on purpose, composable_fsdp."
    "access.set_reduce_scatter_unused_params(module, True) reduces zeros for the rest."
)
SAME_ROUNDS = (
    "Call the model and backward on every rank equally often and in the same mode "
    "(train or eval, with or without gradients), outside of any 'if rank == 0'. "
    f"{UNEVEN}"
)
_SAME_SETTINGS = (
    "Set requires_grad of the same parameters on every rank, and change settings of "
    "units (no_sync, set_requires_gradient_sync, register_comm_hook, ..) on every "
    "rank, to the same values and before the same forward."
)
_ONE_RANK_RAISED = (
    "If a rank catches an exception of a forward or a backward and goes on, every rank "
    "has to leave the same forward or backward at the same place: let the ranks agree "
    "(an all-reduce of a flag) whether a sample is skipped before they call the model, "
    "or let the exception end the program."
)


class Fact(NamedTuple):
    """An action of a rank in words, in the form in which ranks compare it."""

    does: str
    """As ``"runs 'blocks.2'"``."""
    kind: str = USE
    of: str = ""
    """The forward that begins."""
    named: tuple[str, ...] = ()
    """Texts of which usually few differ: parameters without a gradient; at the begin of
    a round, changed flags and settings; the uses of a whole round."""

    def __str__(self) -> str:
        return self.does + (f", with {listed(self.named)}" if self.named else "")


class Said(NamedTuple):
    """What a rank tells of a fact that differs."""

    fact: Fact
    place: tuple[str, ...]
    waiting: str


class LogWords(NamedTuple):
    """How the uses and modes of an order log are told to other ranks."""

    what: str
    """The direction: ``"forward"`` or ``"backward"``."""
    tree: str
    """The class of the root, and the number of the order log."""
    use: Callable[[Any], Fact]
    """Return a use as a fact; ``None`` is the end of the round."""
    mode: Callable[[Any], Fact]
    """Return the begin of a round in a mode as a fact."""
    waiting: Callable[[], str] = str
    """Return which gradients units wait for, for errors."""


class OrderComparison:
    """Compares an order log over the ranks of ``peers``: a ``Peers`` per group.

    ``peers`` is empty if a comparison is not possible. In the methods, ``number`` is
    the number of the log's round and ``at`` the place in the round.
    """

    __slots__ = ("_words", "elsewhere", "peers")

    def __init__(self, peers: Sequence[Peers], words: LogWords) -> None:
        self.peers, self._words = tuple(peers), words
        self.elsewhere: tuple[GroupRef, ...] = ()
        """The other groups of the tree, whose ranks would wait for this rank."""

    def compare(self, number: int, at: str, value: Any) -> None:
        """Compare a use, a mode (at ``BEGIN``) or all uses (at ``END``).

        Collective: an all-gather of 8 bytes over each group of ``peers``; if tags
            differ, an all-gather of objects.
        Raises: DesyncError, on every rank of a group whose ranks differ.
        """
        if not self.peers:
            return
        fact, words = self._fact(at, value), self._words
        # The host cannot read a tag during the capture of a CUDA graph.
        if is_capturing():
            self._meet(number, at, fact, str(fact), way_out(fact, Fact("")))
            return
        # ``tree`` tells trees apart that share the group and the names of units.
        tag = tag_of((words.what, words.tree, at, *fact))
        unlike: list[Peers] = []
        for peers in self.peers:
            # After a difference in a group, this rank sends another tag to the next, so
            # that the ranks there raise, too, and do not wait for this rank.
            tags = collectives.all_gather_tag(~tag if unlike else tag, peers.group)
            if tags.count(tags[0]) != len(tags):
                unlike.append(peers)
        if not unlike:
            return
        # All ranks of these groups have seen the difference, so all exchange objects.
        mine = Said(fact, self._place(number, at), words.waiting())
        told = [gather(mine, [peers.group]) for peers in unlike]
        # The rounds of ranks may have other numbers.
        found = [
            said
            for said in told
            if len({(each.fact, each.place[1]) for each in said.values()}) > 1
        ]
        self._raise(
            difference(found[0])
            if found
            else f"Ranks of another process group disagree in {mine.place[0]}: see the "
            "error of the other ranks."
        )

    def depart(
        self,
        number: int,
        at: str,
        value: Any,
        wanted: Any = None,
        *,
        since: int = 0,
        other: str = "",
    ) -> None:
        """Compare a use or a mode that is not ``wanted``, recorded in round ``since``.

        ``other``: the log that was to begin instead. Waits in the store, for a limited
        time.

        Raises: DesyncError, if another rank does something else.
        """
        if not self.peers:
            return
        fact, words = self._fact(at, value), self._words
        if other:
            does = f"{fact}, where the order of earlier rounds has {other}"
            cure = SAME_ROUNDS
        else:
            mine, recorded = contrast([fact, self._fact(at, wanted)])
            does = (
                f"{mine}{words.waiting()}, where the order recorded in {words.what} "
                f"{since} has: {recorded}"
            )
            cure = way_out(mine, recorded)
        self._meet(number, at, fact, does, cure)

    def meet_after_raise(
        self, number: int, raised: Mapping[int, tuple[int, int]]
    ) -> None:
        """Wait until every rank has abandoned the same rounds at the same uses, too.

        Raises: DesyncError, if a rank went on, or stopped at another use.
        """
        # A rank that has not would be in a collective of such a round, with which the
        # next collective of this rank would pair.
        if not self.peers:
            return
        what = self._words.what
        ended = " and ".join(f"{what} {r} at use {uses}" for r, uses in raised.values())
        does = f"begins {what} {number} after an exception that ended {ended}"
        fact = Fact(f"{does} {sorted(raised.items())}", RAISED)
        self._meet(number, BEGIN, fact, does, _ONE_RANK_RAISED)

    def _fact(self, at: str, value: Any) -> Fact:
        """Return the fact of a use or a mode."""
        if at == BEGIN:
            return self._words.mode(value)
        if at == END:
            uses = tuple([str(self._words.use(each)) for each in value])
            return Fact("ran", RAN, named=uses)
        return self._words.use(value)

    def _place(self, number: int, at: str) -> tuple[str, str]:
        return f"{self._words.what} {number}, at {at}", self._words.tree

    def _meet(self, number: int, at: str, fact: Fact, does: str, cure: str) -> None:
        """Wait until every rank has come to the place with the same fact, too.

        Raises: DesyncError, if a rank does something else, or does not come in time.
        """
        place = self._place(number, at)
        opening = f"In {place[0]}, this rank {does}."
        announced = Announcement(does, does, opening, cure, place, tuple(fact))
        for peers in self.peers:
            require_unbroken(peers.group)
        try:
            for peers in self.peers:
                met = peers.group
                history_of(met).gather(announced)
        except DesyncError as error:
            text = str(error.args[0])
            # Other ranks may follow the record and wait in a collective for this rank.
            for peers in self.peers:
                if not (error.is_known_to_all and peers.group is met):
                    leave(peers.group, text)
            self._raise(text)

    def _raise(self, text: str) -> NoReturn:
        """Raise ``text``, which the ranks of ``peers`` know, also in other groups."""
        # Of hybrid sharding, the other replicas have seen no difference in forward, and
        # wait for this rank in the reductions.
        for each in self.elsewhere:
            if (group := each.ref()) is not None:
                leave(group, text)
        raise DesyncError(text) from None


def difference(said: Mapping[int, Said]) -> str:
    """Return the error of ranks that have ``said`` different things at a place."""
    facts = contrast([each.fact for each in said.values()])
    places = {rank: each.place for rank, each in said.items()}
    if {each.kind for each in facts} == {RAN}:
        orders = [each.fact.named for each in said.values()]
        # The end of a round is a use, too, so one order is no part of the other.
        pairs = enumerate(zip(*orders, strict=False))
        index = next(i for i, uses in pairs if len(set(uses)) > 1)
        facts = [Fact(uses[index]) for uses in orders]
        at = f"use {index} (found at its end)"
        places = {r: (p.replace(END, at), tree) for r, (p, tree) in places.items()}
    told = {
        rank: f"{fact}{each.waiting}"
        for (rank, each), fact in zip(said.items(), facts, strict=True)
    }
    other = next((each for each in facts if each != facts[0]), facts[0])
    return disagreement(told, places, way_out(facts[0], other))


def contrast(facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts without the texts that all of them name.

    >>> facts = [Fact("reduces a", named=("x", "y")), Fact("reduces a", named=("y",))]
    >>> [str(fact) for fact in contrast(facts)]
    ['reduces a, with x', 'reduces a']
    """
    common = set.intersection(*(set(each.named) for each in facts))
    return [
        each._replace(named=tuple(name for name in each.named if name not in common))
        for each in facts
    ]


def way_out(mine: Fact, theirs: Fact) -> str:
    """Return the last sentences of a ``DesyncError``: the way to equal facts."""
    kinds = {mine.kind, theirs.kind}
    if RAISED in kinds:
        return _ONE_RANK_RAISED
    if BEGINS not in kinds:
        return _SAME_UNITS
    # The same call of the model: only flags and settings tell the two apart.
    is_same_call = mine.of == theirs.of
    return _SAME_SETTINGS if is_same_call or mine.named or theirs.named else SAME_ROUNDS
