"""Comparison of an order log with the logs of the other ranks.

Ranks that issue collectives in different orders deadlock or exchange wrong data. A
``DesyncError`` names both orders before that happens::

    compare         all ranks exchange a checksum by an all-gather of 8 bytes; only if
                    checksums differ, they exchange the facts behind them
    depart          this rank alone leaves the record: it writes its use to the store,
                    and waits until all ranks have departed to the same use
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from composable_fsdp.comm.agreement import Peers
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.order_facts import (
    AFTER_RAISE,
    RAN,
    SAME_CALLS,
    Fact,
    Note,
    contrast,
    waiting,
    way_out,
)
from composable_fsdp.comm.watch import StoreWait, leave, require_whole
from composable_fsdp.errors import DesyncError

_REFUSED = "refused"
"""Below a place in the store: the error of a rank that found another fact there."""

ONE_RANK_RAISED = (
    "If a rank catches an exception of a forward or a backward and goes on, every rank "
    "has to leave the same forward or backward at the same place: let the ranks agree "
    "(an all-reduce of a flag) whether a sample is skipped before they call the model, "
    "or let the exception end the program."
)
"""Last sentence of the ``DesyncError`` after an exception on some ranks."""


class Said(NamedTuple):
    """A message of a rank about a fact."""

    what: str
    """The direction."""
    tree: str
    """The tree of the order log (``LogWords.tree``)."""
    number: int
    """The round."""
    at: str
    """The place in the round."""
    fact: Fact
    note: Note
    """Not compared."""


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
    note: Callable[[], Note] = dict
    """Return the units that still wait for gradients, for error messages only."""


class OrderComparison:
    """Compares an order log over the ranks of ``peers``: a ``Peers`` per group.

    ``peers`` is empty if a comparison is not possible. In the methods, ``number`` is
    the number of the log's round, ``index`` that of the use in the round.
    """

    __slots__ = ("_dropped", "_words", "elsewhere", "peers", "said")

    def __init__(self, peers: Sequence[Peers], words: LogWords) -> None:
        self.peers, self._words = tuple(peers), words
        self.said: list[str] = []
        """Places in the store at which this rank wrote in this round."""
        self.elsewhere: tuple[GroupRef, ...] = ()
        """The other groups of the tree, whose ranks would wait for this rank."""
        self._dropped: list[tuple[int, list[str]]] = []
        """Numbers of abandoned rounds, and the places at which this rank wrote."""

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
        if not self.peers:
            return
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
        self._say(number, "its beginning", fact)
        if other:
            # Without a prediction of this tree, another tree was to begin.
            recorded, cure = f"the order of earlier rounds has {other}", SAME_CALLS
        else:
            fact, expected = contrast(fact, words.mode(wanted))
            recorded = (
                f"the order recorded in {words.what} {number - 1} has: "
                f"{words.tell(expected)}"
            )
            cure = way_out(fact, expected)
        story = (
            f"In {words.what} {number}, at its beginning, this rank {words.tell(fact)},"
            f" where {recorded}."
        )
        does = f"{words.tell(fact)}, where {recorded}"
        self._meet(number, "its beginning", does, story, cure)

    def depart(
        self, number: int, index: int, use: object, wanted: object, since: int
    ) -> None:
        """Compare a use that is not the recorded use.

        Waits for the other ranks in the store, for a limited time.
        Raises: DesyncError, if another rank does something else.
        """
        if not self.peers:
            return
        fact, at = self._words.use(use), f"use {index}"
        self._say(number, at, fact)
        mine, recorded = contrast(fact, self._words.use(wanted))
        words = self._words
        does = (
            f"{words.tell(mine)}{waiting(words.note(), recorded)}, where the order "
            f"recorded in {words.what} {since} has: {words.tell(recorded)}"
        )
        story = f"In {words.what} {number}, at {at}, this rank {does}."
        self._meet(number, at, does, story, way_out(mine, recorded))

    def meet_after_tear(self, number: int, torn: Mapping[int, tuple[int, int]]) -> None:
        """Wait until every rank has abandoned the same rounds at the same uses, too.

        A rank that has not would be in a collective of such a round, with which the
        next collective of this rank would pair.

        Waits for the other ranks in the store, for a limited time.
        Raises: DesyncError, if a rank went on, or stopped at another use.
        """
        if not self.peers:
            return
        details = tuple(n for log in sorted(torn) for n in (log, *torn[log]))
        self._say(number, "a meeting", Fact(AFTER_RAISE, details=details))
        ended = " and ".join(
            f"{self._words.what} {round_} at use {uses}"
            for round_, uses in torn.values()
        )
        does = (
            f"begins {self._words.what} {number} after an exception that ended {ended}"
        )
        self._meet(number, "a meeting", does, f"This rank {does}.", ONE_RANK_RAISED)
        # Every rank has come here, so no rank comes to a place of a dropped round: a
        # program may end all of its rounds by an exception.
        self._leave_dropped()

    def clear(self, number: int, *, dropped: bool) -> None:
        """Remove the keys of round ``number`` from the store, once all ranks ended it.

        The keys of a round that was ``dropped`` are removed with those of the next
        round that wrote, or after the next meeting.
        """
        said, self.said = self.said, []
        self._dropped.append((number, said))
        if not dropped:
            self._leave_dropped()

    def _leave_dropped(self) -> None:
        """Remove the keys of all rounds that this rank has left."""
        finished, self._dropped = self._dropped, []
        # Peers that wrote at the same places count here, and the last peer removes the
        # keys.
        for each, places in finished:
            for peers in self.peers:
                peers.leave(f"{each}", places)

    def _exchange(self, number: int, at: str, fact: Fact) -> None:
        """Compare ``fact`` by checksums, and by value on groups whose ranks differ."""
        words = self._words
        # The host cannot read a checksum during the capture of a CUDA graph, so the
        # ranks compare in the store.
        if is_capturing():
            self._say(number, at, fact)
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
        mine = Said(words.what, words.tree, number, at, fact, words.note())
        errors = [
            self._difference(mine, theirs, rank)
            for peers in groups
            for rank, theirs in zip(
                peers.ranks, peers.gather_objects(mine), strict=True
            )
            if theirs[:-1] != mine[:-1]
        ]
        self._raise_beside(
            errors[0]
            if errors
            else f"Ranks of another process group disagree in {words.what} {number}, "
            f"at {at}: see the error of the other ranks."
        )

    def _difference(self, mine: Said, theirs: Said, rank: int) -> str:
        """Return the error text for global rank ``rank``, which says ``theirs``."""
        here, there = contrast(mine.fact, theirs.fact)
        if here.action == there.action == RAN:
            pairs = enumerate(zip(here.details, there.details, strict=False))
            # The end of a round is a use, too, so one order is no part of the other.
            index, (one, other) = next(p for p in pairs if p[1][0] != p[1][1])
            at = f"use {index} (found at its end)"
            here, there = Fact(RAN, details=(one,)), Fact(RAN, details=(other,))
            mine, theirs = mine._replace(at=at), theirs._replace(at=at)
        tell = self._words.tell
        own = f"this rank {tell(here)}{waiting(mine.note, there)}"
        peer = f"rank {rank} {tell(there)}{waiting(theirs.note, here)}"
        place = f"{mine.what} {mine.number}, at {mine.at}"
        if mine[:2] == theirs[:2] and mine.at == theirs.at:
            told = f"Ranks disagree in {place}: {own}, {peer}"
        else:
            told = (
                f"Ranks disagree: in {place} of {mine.tree}, {own}; in {theirs.what} "
                f"{theirs.number}, at {theirs.at} of {theirs.tree}, {peer}"
            )
        # Of two trees, the facts may be equal.
        cure = way_out(here, there) if mine.tree == theirs.tree else SAME_CALLS
        return f"{told}. {cure}"

    def _say(self, number: int, at: str, fact: Fact) -> None:
        """Write ``fact`` at a place of the store.

        Raises: DesyncError, if another rank wrote another fact there.
        """
        words, place = self._words, f"{number}/{at}"
        mine = Said(words.what, words.tree, number, at, fact, words.note())
        for peers in self.peers:
            require_whole(peers.group)
        self.said.append(place)
        # The first rank at the place writes. Later ranks compare their fact with the
        # first.
        for peers in self.peers:
            other = peers.say(place, fact, mine.note)
            if other is not None:
                theirs = mine._replace(fact=Fact.of(other.value), note=other.note)
                text = self._difference(mine, theirs, other.rank)
                # The ranks that wrote before wait at this place for all ranks.
                for each in self.peers:
                    each.say(f"{place}/{_REFUSED}", f"rank {dist.get_rank()}: {text}")
                self._raise(place, text)

    def _meet(self, number: int, at: str, does: str, story: str, way_out: str) -> None:
        """Wait until every rank has come to the place, too.

        Raises: DesyncError, if a rank does not arrive in time.
        """
        # All arrivals before the first wait: ranks of another group may wait for this
        # rank.
        place = f"{number}/{at}"
        for peers in self.peers:
            peers.arrive(place)

        def missing() -> list[int]:
            # A rank that came later may have raised instead of waiting here.
            if refused := peers.heard(f"{place}/{_REFUSED}"):
                self._raise_beside(f"{story} Of {refused}")
            return peers.absent(place)

        for peers in self.peers:
            with StoreWait(peers.group, does, way_out) as wait:
                while not peers.is_open(place):
                    if why := wait.pause(missing):
                        if "never meet" not in why:
                            why = f"{why[:1].upper()}{why[1:].rstrip('.')}. {way_out}"
                        self._raise(place, f"{story} {why}")

    def _raise(self, place: str, text: str) -> NoReturn:
        """Raise ``text``, also on ranks that wait for this rank in a collective."""
        # Other ranks may follow the record and wait in a collective for this rank.
        for peers in self.peers:
            if set(peers.absent(place)) - {dist.get_rank()}:
                leave(peers.group, text)
        self._raise_beside(text)

    def _raise_beside(self, text: str) -> NoReturn:
        """Raise ``text``, which the ranks of ``peers`` know, also in other groups."""
        # Of hybrid sharding, the other replicas have seen no difference in forward, and
        # wait for this rank in the reductions.
        for each in self.elsewhere:
            if (group := each.ref()) is not None:
                leave(group, text)
        raise DesyncError(text)


def checksum(value: tuple[object, ...]) -> int:
    """Return a checksum of plain tuples of strings and integers, in 63 bits."""
    # 63 bits, because the tag is a signed integer; ``hash`` differs from rank to rank.
    # ``repr`` takes a quarter of the time of JSON.
    text = repr(value).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
