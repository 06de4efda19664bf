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
from collections.abc import Callable, Hashable, Sequence

from composable_fsdp.comm.agreement import Peers
from composable_fsdp.errors import DesyncError

REDUCES = "reduces the gradients of "
"""Text of a reduction, before the name of the unit."""
NO_GRADIENT = ", with none for "
"""Text of a reduction, between the unit and the parameters without a gradient."""

NOTHING: Sequence[object] = (None,)
"""The record of a round without a record: ``None`` is no use, so no use matches."""

WAY_OUT = (
    "Every rank must run the same units in the same order: take decisions in the model "
    "from what is equal on all ranks. If ranks use different parameters on purpose, "
    "set_reduce_scatter_unused_params(module, True) reduces zeros for the unused ones."
)
"""Last sentences of every ``DesyncError`` of this module."""


class OrderLog:
    """The order of uses in a direction (forward or backward) over some process groups.

    ``what`` is the direction. ``peers`` are the ranks to compare with, per group; empty
    if a comparison is not possible. ``tell(use)`` describes a use in words, where
    ``None`` is the end of the round; ``tell_mode(mode)`` describes a mode. ``note()``
    describes units that still wait for gradients, a line ``unit: parameters`` each. The
    note is never compared across ranks; the note is only added to error messages.
    """

    __slots__ = (
        "_entries",
        "_known",
        "_last",
        "_open",
        "_recorded_in",
        "_recording",
        "_run",
        "_said",
        "_successors",
        "expected",
        "note",
        "peers",
        "position",
        "round",
        "tell",
        "tell_mode",
        "what",
    )

    def __init__(
        self,
        what: str,
        peers: Sequence[Peers],
        tell: Callable[[object], str],
        tell_mode: Callable[[Hashable], str],
        note: Callable[[], str] = str,
    ) -> None:
        self.what, self.peers, self.note = what, tuple(peers), note
        self.tell, self.tell_mode = tell, tell_mode
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
            self._say(f"{self.round}/{len(self._entries)}", self.tell(use))
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
            self._known[self._last] = self._entries
            self._recorded_in[self._last] = self.round
        said, self._said = self._said, []
        if said:
            # Peers that wrote at the same places count here, and the last peer removes
            # the keys.
            for peers in self.peers:
                peers.leave(f"{self.round}", said)
        self.drop()

    def drop(self) -> None:
        """Abandon the round in progress, if any; the records stay as they were."""
        self._open = self._recording = False
        self._said = []
        self.expected, self.position = NOTHING, 0

    def _begin(self, mode: Hashable) -> None:
        """Begin a round: compare the predicted mode with ``mode``, find the record."""
        self.round += 1
        self._open = True
        # The mode of a round is predicted from the mode before, and from how many
        # rounds in a row had that mode: an evaluation after every 100 steps is
        # predicted from the second time on. Without experience, a mode that ran twice
        # is expected again.
        usual = self._last if self._run > 1 else None
        predicted = self._successors.get((self._last, self._run), usual)
        if predicted != mode:
            place, text = f"{self.round}/mode", self.tell_mode(mode)
            self._say(place, text)
            # Ranks whose prediction comes true write nothing, so this rank must wait
            # for all ranks to write the same mode.
            if predicted is not None:
                self._meet(place, text, self.tell_mode(predicted), self.round - 1)
            self._successors[self._last, self._run] = mode
        self._run = self._run + 1 if mode == self._last else 1
        self._last = mode
        self._entries = []
        self._recording = mode not in self._known
        self.expected = self._known.get(mode, NOTHING)
        self.position = 0

    def _leave_record(self, place: str, use: object, wanted: object) -> None:
        """Write the use that differs from the record, and wait for the other ranks."""
        text = self.tell(use)
        self._say(place, text)
        since = self._recorded_in[self._last]
        self._meet(place, text, self.tell(wanted), since)

    def _say(self, place: str, text: str) -> None:
        """Write ``text`` at ``place``.

        Raises: DesyncError, if another rank wrote another text there.
        """
        self._said.append(place)
        # The first rank at the place writes. Later ranks compare their text with the
        # first.
        note = self.note()
        for peers in self.peers:
            other = peers.say(place, text, note)
            if other is not None:
                mine, theirs = contrast(text, other.text)
                raise DesyncError(
                    f"Ranks disagree in {self.what} {self.round}, at {_at(place)}: "
                    f"this rank {mine}{waiting(note, theirs)}, rank {other.rank} "
                    f"{theirs}{waiting(other.note, mine)}. {WAY_OUT}"
                )

    def _meet(self, place: str, text: str, wanted: str, since: int) -> None:
        """Wait until every rank has left its record at ``place``, too.

        Raises: DesyncError, if a rank does not arrive in time.
        """
        text, wanted = contrast(text, wanted)
        story = (
            f"In {self.what} {self.round}, at {_at(place)}, this rank {text}"
            f"{waiting(self.note(), wanted)}, where the order recorded in {self.what} "
            f"{since} has: {wanted}."
        )
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
                    f"{peers.timeout():g} s. {WAY_OUT}"
                )


def contrast(mine: str, theirs: str) -> tuple[str, str]:
    """Remove parameters that both texts name, so that the texts show the difference.

    >>> contrast("reduces a, with none for x, y", "reduces a, with none for y")
    ('reduces a, with none for x', 'reduces a')
    """
    head, _, here = mine.partition(NO_GRADIENT)
    other_head, _, there = theirs.partition(NO_GRADIENT)
    # Different units or actions: the texts differ before the parameters.
    if head != other_head:
        return mine, theirs
    return _less(head, here, there), _less(head, there, here)


def _less(head: str, names: str, others: str) -> str:
    """Return the text of a reduction without the parameters named in ``others``."""
    known = others.split(", ")
    left = [name for name in names.split(", ") if name not in known]
    return f"{head}{NO_GRADIENT}{', '.join(left)}" if any(left) else head


def waiting(note: str, reduced: str) -> str:
    """Return why a rank does not send the reduction ``reduced``: missing gradients.

    >>> waiting("'a': 'a.x'", "reduces the gradients of 'a'")
    " and has no gradient yet for 'a.x'"
    """
    # A line of the note names a unit and the parameters for which the unit waits.
    for line in note.splitlines():
        unit, _, names = line.partition(": ")
        if reduced.partition(NO_GRADIENT)[0] == REDUCES + unit:
            return f" and has no gradient yet for {names}"
    return ""


def _at(place: str) -> str:
    """Return the position inside the round that ``place`` names, in words."""
    position = place.rpartition("/")[2]
    return "its beginning" if position == "mode" else f"use {position}"
