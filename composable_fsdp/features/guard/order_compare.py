"""Comparison of an order log with the logs of the other ranks.

Ranks that issue collectives in different orders deadlock or exchange wrong data. A
``DesyncError`` names both orders before that happens::

    compare         all ranks exchange a checksum by an all-gather of 8 bytes; only if
                    checksums differ, they exchange the facts behind them
    depart          this rank alone leaves the record: it meets the other ranks in the
                    store (``meetings``), who must have departed to the same use
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from composable_fsdp.comm.agreement import Peers
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.meeting import alone_text, unlike_text
from composable_fsdp.comm.operations import leave
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.meetings import history_of
from composable_fsdp.features.guard.order_facts import (
    AFTER_RAISE,
    RAN,
    SAME_CALLS,
    Fact,
    Waiting,
    contrast,
    waiting_text,
    way_out,
)
from composable_fsdp.features.guard.watch import require_unbroken


class LogWords(NamedTuple):
    """How the uses and modes of an order log are told to other ranks."""

    what: str
    """The direction: ``"forward"`` or ``"backward"``."""
    tree: str
    """The class of the root, and the number of the order log."""
    use: Callable[[object], Fact]
    """Return a use as a fact; ``None`` is the end of the round."""
    mode: Callable[[Hashable], Fact]
    """Return the begin of a round in a mode as a fact."""
    tell: Callable[[Fact], str]
    """Return a fact in words."""
    waiting: Callable[[], Waiting] = dict
    """Return the units that still wait for gradients, for error messages only."""


class Said(NamedTuple):
    """A message of a rank about a fact."""

    what: str
    tree: str
    number: int
    """The round."""
    at: str
    """The place in the round."""
    fact: Fact
    waiting: Waiting
    """Not compared."""


class Departure(NamedTuple):
    """A place at which a rank leaves the record, as it meets other ranks there."""

    said: Said
    does: str
    """What this rank does, as "runs 'blocks.2'", with what is recorded instead."""
    way_out: str
    tell: Callable[[Fact], str]

    @property
    def told(self) -> str:
        """The fact in words, for ranks that make another call."""
        return f"{self.tell(self.said.fact)} in {self.said.what} {self.said.number}"

    @property
    def facts(self) -> object:
        """What is compared, as JSON returns it."""
        return json.loads(json.dumps(self.said[:-1]))

    @property
    def predicate(self) -> str:
        """What this rank does, for ranks that wait for it."""
        return self.does

    def alone(self, why: str) -> str:
        """Return the error of this rank if the others do not come."""
        said = self.said
        story = f"In {said.what} {said.number}, at {said.at}, this rank {self.does}."
        return alone_text(story, why, self.way_out)

    def unlike(self, here: Mapping[int, tuple[str, Any]]) -> str:
        """Return the error for the ranks that are ``here``, by what each does."""
        for rank, (_, facts) in sorted(here.items()):
            if facts is not None and self.facts != facts:
                what, tree, number, at, fact = facts
                theirs = Said(what, tree, number, at, Fact.of(fact), {})
                return difference(self.said, theirs, rank, self.tell)
        return unlike_text(here)


class OrderComparison:
    """Compares an order log over the ranks of ``peers``: a ``Peers`` per group.

    ``peers`` is empty if a comparison is not possible. In the methods, ``number`` is
    the number of the log's round, ``index`` that of the use in the round.
    """

    __slots__ = ("_words", "elsewhere", "peers")

    def __init__(self, peers: Sequence[Peers], words: LogWords) -> None:
        self.peers, self._words = tuple(peers), words
        self.elsewhere: tuple[GroupRef, ...] = ()
        """The other groups of the tree, whose ranks would wait for this rank."""

    def compare_begin(self, number: int, mode: Hashable) -> None:
        """Compare the begin of a round, which no rank could expect.

        Collective: as ``compare``.
        Raises: DesyncError, as ``compare``.
        """
        if self.peers:
            self._exchange(number, "its beginning", self._words.mode(mode))

    def compare(self, number: int, index: int, use: object) -> None:
        """Compare a use of a round that all ranks record.

        Collective: an all-gather of 8 bytes over each group of ``peers``; if checksums
            differ, an all-gather of objects.
        Raises: DesyncError, on every rank of a group whose ranks differ.
        """
        if self.peers:
            self._exchange(number, f"use {index}", self._words.use(use))

    def compare_round(self, number: int, uses: Sequence[object]) -> None:
        """Compare all uses of a round that has ended.

        Collective: as ``compare``.
        Raises: DesyncError, as ``compare``.
        """
        if self.peers:
            told = [self._words.tell(self._words.use(use)) for use in uses]
            self._exchange(number, "its end", Fact(RAN, details=tuple(told)))

    def depart_begin(
        self, number: int, mode: Hashable, *, other: str, wanted: Hashable
    ) -> None:
        """Compare the begin of a round that is not the expected begin.

        Waits for the other ranks in the store, for a limited time.
        Raises: DesyncError, if another rank begins another round.
        """
        if not self.peers:
            return
        words = self._words
        fact = words.mode(mode)
        if other:
            # Without a prediction of this tree, another tree was to begin.
            recorded, cure = f"the order of earlier rounds has {other}", SAME_CALLS
            mine = fact
        else:
            mine, expected = contrast(fact, words.mode(wanted))
            recorded = (
                f"the order recorded in {words.what} {number - 1} has: "
                f"{words.tell(expected)}"
            )
            cure = way_out(mine, expected)
        does = f"{words.tell(mine)}, where {recorded}"
        self._meet(number, "its beginning", fact, does, cure)

    def depart(
        self, number: int, index: int, use: object, wanted: object, since: int
    ) -> None:
        """Compare a use that is not the recorded use.

        Waits for the other ranks in the store, for a limited time.
        Raises: DesyncError, if another rank does something else.
        """
        if not self.peers:
            return
        words = self._words
        fact = words.use(use)
        mine, recorded = contrast(fact, words.use(wanted))
        does = (
            f"{words.tell(mine)}{waiting_text(words.waiting(), recorded)}, where the "
            f"order recorded in {words.what} {since} has: {words.tell(recorded)}"
        )
        self._meet(number, f"use {index}", fact, does, way_out(mine, recorded))

    def meet_after_raise(
        self, number: int, raised: Mapping[int, tuple[int, int]]
    ) -> None:
        """Wait until every rank has abandoned the same rounds at the same uses, too.

        A rank that has not would be in a collective of such a round, with which the
        next collective of this rank would pair.

        Waits for the other ranks in the store, for a limited time.
        Raises: DesyncError, if a rank went on, or stopped at another use.
        """
        if not self.peers:
            return
        details = tuple(n for log in sorted(raised) for n in (log, *raised[log]))
        fact = Fact(AFTER_RAISE, details=details)
        what = self._words.what
        ended = " and ".join(f"{what} {r} at use {uses}" for r, uses in raised.values())
        does = f"begins {what} {number} after an exception that ended {ended}"
        self._meet(number, "its beginning", fact, does, way_out(fact, fact))

    def _exchange(self, number: int, at: str, fact: Fact) -> None:
        """Compare ``fact`` by checksums, and by value on groups whose ranks differ."""
        words = self._words
        # The host cannot read a checksum during the capture of a CUDA graph, so the
        # ranks compare in the store.
        if is_capturing():
            self._meet(number, at, fact, words.tell(fact), way_out(fact, fact))
            return
        # ``tree`` tells trees apart that share the group and the names of units.
        tag = checksum((words.what, words.tree, at, *fact))
        groups: list[Peers] = []
        for peers in self.peers:
            # After a difference in a group, this rank sends another checksum to the
            # next, so that the ranks there raise, too, and do not wait for this rank.
            tags = peers.gather_tags(~tag if groups else tag)
            if tags.count(tags[0]) != len(tags):
                groups.append(peers)
        if not groups:
            return
        # All ranks of these groups have seen the difference, so all exchange objects.
        # The names are sent only now: a fact of many parameters is long.
        mine = Said(words.what, words.tree, number, at, fact, words.waiting())
        errors = [
            difference(mine, theirs, rank, words.tell)
            for peers in groups
            for rank, theirs in zip(
                peers.ranks, peers.gather_objects(mine), strict=True
            )
            if theirs[:-1] != mine[:-1]
        ]
        self._raise(
            errors[0]
            if errors
            else f"Ranks of another process group disagree in {words.what} {number}, "
            f"at {at}: see the error of the other ranks."
        )

    def _meet(self, number: int, at: str, fact: Fact, does: str, cure: str) -> None:
        """Wait until every rank has come to the place with the same fact, too.

        Raises: DesyncError, if a rank does something else, or does not come in time.
        """
        words = self._words
        said = Said(words.what, words.tree, number, at, fact, {})
        departure = Departure(said, does, cure, words.tell)
        for peers in self.peers:
            require_unbroken(peers.group)
        try:
            for peers in self.peers:
                met = peers.group
                history_of(met).gather(departure)
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


def difference(mine: Said, theirs: Said, rank: int, tell: Callable[[Fact], str]) -> str:
    """Return the error text for global rank ``rank``, which says ``theirs``."""
    here, there = contrast(mine.fact, theirs.fact)
    if here.action == there.action == RAN:
        pairs = enumerate(zip(here.details, there.details, strict=False))
        # The end of a round is a use, too, so one order is no part of the other.
        index, (one, other) = next(p for p in pairs if p[1][0] != p[1][1])
        at = f"use {index} (found at its end)"
        here, there = Fact(RAN, details=(one,)), Fact(RAN, details=(other,))
        mine, theirs = mine._replace(at=at), theirs._replace(at=at)
    own = f"this rank {tell(here)}{waiting_text(mine.waiting, there)}"
    peer = f"rank {rank} {tell(there)}{waiting_text(theirs.waiting, here)}"
    place = f"{mine.what} {mine.number}, at {mine.at}"
    if mine[:2] == theirs[:2] and mine.at == theirs.at:
        text = f"Ranks disagree in {place}: {own}, {peer}"
    else:
        text = (
            f"Ranks disagree: in {place} of {mine.tree}, {own}; in {theirs.what} "
            f"{theirs.number}, at {theirs.at} of {theirs.tree}, {peer}"
        )
    # Of two trees, the facts may be equal.
    cure = way_out(here, there) if mine.tree == theirs.tree else SAME_CALLS
    return f"{text}. {cure}"


def checksum(value: tuple[object, ...]) -> int:
    """Return a checksum of plain tuples of strings and integers, in 63 bits."""
    # 63 bits, because the tag is a signed integer; ``hash`` differs from rank to rank.
    # ``repr`` takes a quarter of the time of JSON.
    text = repr(value).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
