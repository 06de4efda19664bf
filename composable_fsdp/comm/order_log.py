"""The order of collectives on this rank, compared with the order on other ranks.

Ranks that issue collectives in different orders deadlock or exchange wrong data. An
``OrderLog`` raises ``DesyncError`` before that happens. A *round* is a forward or a
backward. The first round of a mode (training or evaluation, outermost unit, ...)
records the uses of units. Later rounds are compared with the record. In the steady
state, the comparison is a look at the next entry, inlined before each collective::

    if log.expected[log.position] is unit:
        log.position += 1
    else:
        log.depart(unit, mode)

Only a rank without a matching entry communicates, through the key-value store::

    this rank              its next use    action
    follows the record     as recorded     nothing is written, no wait
    follows the record     another use     depart: write the use, and wait until all
                                           ranks have departed to the same use
    records                any             write the use, no wait; raise if another
                                           rank wrote another use at the same place
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from composable_fsdp.comm.agreement import Peers
from composable_fsdp.errors import DesyncError
from composable_fsdp.naming import quoted

REDUCE = "reduce"
"""Action of a fact: the unit reduces its gradients."""

NOTHING: Sequence[object] = (None,)
"""The record of a round without a record: ``None`` is no use, so no use matches."""

MOST_MODES = 64
"""Number of modes whose records are kept, and of successors. The oldest goes first, on
all ranks alike, because all ranks record in the same rounds."""

WAY_OUT = (
    "Every rank must run the same units in the same order: take decisions in the model "
    "from what is equal on all ranks. If ranks use different parameters on purpose, "
    "set_reduce_scatter_unused_params(module, True) reduces zeros for the unused ones."
)
"""Last sentences of every ``DesyncError`` of this module."""


ONE_RANK_RAISED = (
    "If a rank catches an exception of a forward or a backward and goes on, every rank "
    "has to leave the same forward or backward at the same place: let the ranks agree "
    "(an all-reduce of a flag) whether a sample is skipped before they call the model, "
    "or let the exception end the program."
)
"""Last sentence of the ``DesyncError`` after an exception on some ranks."""


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

    @classmethod
    def of(cls, value: Sequence[Any]) -> Fact:
        """Return the fact that JSON has turned into the list ``value``."""
        action, unit, details, missing = value
        return cls(action, unit, tuple(details), tuple(missing))


Note = Mapping[str, Sequence[str]]
"""Units that wait for gradients, each with the parameters that lack a gradient."""


class OrderLog:
    """The order of uses in a direction (forward or backward) over some process groups.

    ``what`` is the direction. ``peers`` are the ranks to compare with, per group; empty
    if a comparison is not possible. ``describe(use)`` returns a use as a fact, where
    ``None`` is the end of the round; ``describe_mode(mode)`` does so for a mode.
    ``word(fact)`` tells a fact in words, for errors. ``note()`` returns the units that
    still wait for gradients. The note is never compared across ranks; the note is only
    added to error messages.
    """

    __slots__ = (
        "_dropped",
        "_entries",
        "_known",
        "_last",
        "_open",
        "_recorded_in",
        "_recording",
        "_run",
        "_said",
        "_successors",
        "_torn",
        "describe",
        "describe_mode",
        "expected",
        "note",
        "peers",
        "position",
        "round",
        "what",
        "word",
    )

    def __init__(
        self,
        what: str,
        peers: Sequence[Peers],
        describe: Callable[[object], Fact],
        describe_mode: Callable[[Hashable], Fact],
        word: Callable[[Fact], str],
        note: Callable[[], Note] = dict,
    ) -> None:
        self.what, self.peers, self.note = what, tuple(peers), note
        self.describe, self.describe_mode, self.word = describe, describe_mode, word
        self.round = 0
        """Number of the current round, or of the last round."""
        self.expected: Sequence[object] = NOTHING
        """The recorded uses of this round, then ``None``."""
        self.position = 0
        """Index of the next use in ``expected``."""
        self._open = self._recording = False
        self._entries: list[object] = []
        """Uses of this round, while this rank records."""
        self._known: dict[Hashable, list[object]] = {}
        """The record of each mode."""
        self._recorded_in: dict[Hashable, int] = {}
        """By mode: the round in which the record was made."""
        self._last: Hashable = None
        """The mode of the current round, or of the last round."""
        self._run = 0
        """Number of consecutive rounds with mode ``_last``."""
        self._successors: dict[tuple[Hashable, int], Hashable] = {}
        """By mode and length of its run: the mode that followed."""
        self._said: list[str] = []
        """Places in the store at which this rank wrote in this round."""
        self._torn: tuple[int, int] | None = None
        """Number of the last abandoned round, and of its uses, if other ranks may wait
        in collectives of that round which this rank has left out."""
        self._dropped: list[tuple[int, list[str]]] = []
        """Numbers of abandoned rounds, and the places at which this rank wrote."""

    @property
    def is_open(self) -> bool:
        """Whether a round is in progress."""
        return self._open

    def depart(self, use: object, mode: Hashable) -> None:
        """Record a use that is not the expected use; call before its collective.

        The first use of a round always calls this method, which begins the round.
        ``mode`` is read only then.

        Collective: none. Writes keys to the store; if a record is left, waits for the
        other ranks, for a limited time.
        Raises: DesyncError, if another rank does something else.
        """
        # The first use of a round has no record to compare with until the mode is
        # known.
        if not self._open:
            self._begin(mode)
            if self.expected[self.position] == use:
                self.position += 1
                return
        if not self._recording:
            # From here on this rank records; the uses so far equal the old record.
            wanted = self.expected[self.position]
            self._entries = list(self.expected[: self.position])
            self.expected, self.position, self._recording = NOTHING, 0, True
            index = len(self._entries)
            self._leave_record(f"{self.round}/{index}", use, wanted)
        else:
            # All ranks record this mode, so every rank writes and no rank has to wait.
            self._say(f"{self.round}/{len(self._entries)}", self.describe(use))
        self._entries.append(use)

    def end(self) -> None:
        """End the round, if a round is in progress.

        Fewer uses than recorded are a departure, too.

        Collective: none, as ``depart``.
        Raises: DesyncError, as ``depart``.
        """
        if not self._open:
            return
        if self._recording or self.expected[self.position] is not None:
            self.depart(None, None)
            # Moved to the end: the first mode is the mode whose record is the oldest.
            self._known.pop(self._last, None)
            self._known[self._last] = self._entries
            self._recorded_in[self._last] = self.round
            if len(self._known) > MOST_MODES:
                oldest = next(iter(self._known))
                del self._known[oldest], self._recorded_in[oldest]
        said, self._said = self._said, []
        # Peers that wrote at the same places count here, and the last peer removes the
        # keys. Only a round that wrote visits the store, for earlier rounds, too.
        if said:
            finished = [*self._dropped, (self.round, said)]
            self._dropped.clear()
            for number, places in finished:
                for peers in self.peers:
                    peers.leave(f"{number}", places)
        self._close()

    def drop(self) -> None:
        """Abandon the round in progress, if any; the records stay as they were.

        If the round has further uses, the next round begins by a meeting of all ranks.
        """
        # The number of further uses is not known while this rank records.
        if self._recording or (self._open and self.expected[self.position] is not None):
            uses = len(self._entries) if self._recording else self.position
            self._torn = self.round, uses
        if self._said:
            self._dropped.append((self.round, self._said))
        self._close()

    def _close(self) -> None:
        """Leave the round that has ended or was abandoned."""
        self._open = self._recording = False
        self._said = []
        self.expected, self.position = NOTHING, 0

    def _begin(self, mode: Hashable) -> None:
        """Begin a round: compare the predicted mode with ``mode``, find the record."""
        self.round += 1
        self._open = True
        if self._torn is not None:
            self._meet_after_tear(*self._torn)
        # The mode of a round is predicted from the mode before, and from how many
        # rounds in a row had that mode: an evaluation after every 100 steps is
        # predicted from the second time on. Without experience, a mode that ran twice
        # is expected again.
        usual = self._last if self._run > 1 else None
        predicted = self._successors.get((self._last, self._run), usual)
        if predicted != mode:
            place, fact = f"{self.round}/mode", self.describe_mode(mode)
            self._say(place, fact)
            # Ranks whose prediction comes true write nothing, so this rank must wait
            # for all ranks to write the same mode.
            if predicted is not None:
                wanted = self.describe_mode(predicted)
                story = self._story(place, fact, wanted, self.round - 1)
                self._meet(place, story, WAY_OUT)
            self._successors.pop((self._last, self._run), None)
            self._successors[self._last, self._run] = mode
            if len(self._successors) > MOST_MODES:
                del self._successors[next(iter(self._successors))]
        self._run = self._run + 1 if mode == self._last else 1
        self._last = mode
        self._entries = []
        self._recording = mode not in self._known
        self.expected = self._known.get(mode, NOTHING)
        self.position = 0

    def _meet_after_tear(self, torn: int, uses: int) -> None:
        """Wait until every rank has abandoned round ``torn`` after ``uses`` uses, too.

        A rank that has not would be in a collective of that round, with which the next
        collective of this rank would pair.

        Raises: DesyncError, if a rank went on, or stopped at another use.
        """
        place = f"{self.round}/torn"
        self._say(place, Fact("begin after a raise", details=(torn, uses)))
        story = (
            f"This rank begins {self.what} {self.round} after an exception that ended "
            f"{self.what} {torn} at use {uses}."
        )
        self._meet(place, story, ONE_RANK_RAISED)
        self._torn = None

    def _leave_record(self, place: str, use: object, wanted: object) -> None:
        """Write the use that differs from the record, and wait for the other ranks."""
        fact = self.describe(use)
        self._say(place, fact)
        since = self._recorded_in[self._last]
        story = self._story(place, fact, self.describe(wanted), since)
        self._meet(place, story, WAY_OUT)

    def _say(self, place: str, fact: Fact) -> None:
        """Write ``fact`` at ``place``.

        Raises: DesyncError, if another rank wrote another fact there.
        """
        self._said.append(place)
        # The first rank at the place writes. Later ranks compare their fact with the
        # first.
        note = self.note()
        for peers in self.peers:
            other = peers.say(place, fact, note)
            if other is not None:
                mine, theirs = contrast(fact, Fact.of(other.value))
                raise DesyncError(
                    f"Ranks disagree in {self.what} {self.round}, at {_at(place)}: "
                    f"this rank {self.word(mine)}{waiting(note, theirs)}, rank "
                    f"{other.rank} {self.word(theirs)}{waiting(other.note, mine)}. "
                    f"{WAY_OUT}"
                )

    def _story(self, place: str, fact: Fact, wanted: Fact, since: int) -> str:
        """Return how ``fact`` differs from the record of round ``since``, in words."""
        fact, wanted = contrast(fact, wanted)
        return (
            f"In {self.what} {self.round}, at {_at(place)}, this rank {self.word(fact)}"
            f"{waiting(self.note(), wanted)}, where the order recorded in {self.what} "
            f"{since} has: {self.word(wanted)}."
        )

    def _meet(self, place: str, story: str, way_out: str) -> None:
        """Wait until every rank has come to ``place``, too.

        Raises: DesyncError, if a rank does not arrive in time.
        """
        # All arrivals before the first wait: ranks of another group may wait for this
        # rank.
        for peers in self.peers:
            peers.arrive(place)

        # A warning names the absent ranks while this rank still waits.
        def notice(absent: list[int]) -> None:
            warnings.warn(f"{story} Waiting for ranks {absent}.", stacklevel=2)

        for peers in self.peers:
            absent = peers.missing(place, notice)
            if absent:
                raise DesyncError(
                    f"{story} Ranks {absent} did not follow within "
                    f"{peers.timeout():g} s. {way_out}"
                )


def contrast(mine: Fact, theirs: Fact) -> tuple[Fact, Fact]:
    """Remove parameters that both facts name, so that the facts show the difference.

    >>> mine, theirs = contrast(
    ...     Fact(REDUCE, "a", missing=("x", "y")), Fact(REDUCE, "a", missing=("y",))
    ... )
    >>> mine.missing, theirs.missing
    (('x',), ())
    """
    # Different units or actions: the facts differ before the parameters.
    if mine._replace(missing=()) != theirs._replace(missing=()):
        return mine, theirs
    return _without(mine, theirs.missing), _without(theirs, mine.missing)


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
    return f" and has no gradient yet for {', '.join(map(quoted, note[fact.unit]))}"


def _at(place: str) -> str:
    """Return the position inside the round that ``place`` names, in words."""
    position = place.rpartition("/")[2]
    return f"use {position}" if position.isdecimal() else "its beginning"
