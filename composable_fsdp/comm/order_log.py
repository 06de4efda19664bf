"""What this rank sends in one direction, use by use, against what it sent last time.

A *round* is one forward, or one backward. Its uses are recorded once per mode (training
or not, which unit came first, ..). Later rounds follow the record, and that is all the
steady state does: a look at the next entry, by whoever is about to send::

    if log.expected[log.position] is unit:
        log.position += 1
    else:
        log.depart(unit, mode)

What happens where there is nothing to follow:

* *recording* (the first round of a mode): each use is said aloud before it is sent, and
  a rank that finds another one's word there raises. All ranks record, so nobody waits.
* *departing* from the record: ranks that follow theirs say nothing, so this one waits,
  for a bounded time, until all have departed to the same use, and records from there.

Which mode comes next is predicted and compared in the same way, from how often the last
one has run in a row: an evaluation after every 100 steps is expected the second time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence

from composable_fsdp.comm.agreement import Peers
from composable_fsdp.errors import DesyncError

REDUCES = "reduces the gradients of "
NO_GRADIENT = ", with none for "
"""The words of a reduction: before the unit, and before what had no gradient."""

NOTHING: Sequence[object] = (None,)
"""The record of a round that is unknown: no use is ever ``None``."""

WAY_OUT = (
    "Every rank must run the same units in the same order: take decisions in the model "
    "from what is equal on all ranks. If ranks use different parameters on purpose, "
    "set_reduce_scatter_unused_params(module, True) reduces zeros for the unused ones."
)


class OrderLog:
    """One direction (``what``: forward or backward) of one tree over some groups.

    ``tell`` puts a use into words, ``None`` being the end of the round; ``tell_mode``
    does so with a mode. ``note`` tells which units wait for gradients, a line ``unit:
    parameters`` each: not compared, but what is wanted to know when a reduction is not
    met. ``peers`` is empty where nobody can be compared with.
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
        self.expected: Sequence[object] = NOTHING
        """Uses of this round by the record, ``None`` after the last."""
        self.position = 0
        self._open = self._recording = False
        self._entries: list[object] = []
        self._known: dict[Hashable, list[object]] = {}
        self._recorded_in: dict[Hashable, int] = {}
        self._last: Hashable = None
        self._run = 0
        """Rounds in a row of mode ``_last``."""
        self._successors: dict[tuple[Hashable, int], Hashable] = {}
        self._said: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether a round is under way."""
        return self._open

    def depart(self, use: object, mode: Hashable) -> None:
        """Take note of a use that is not the expected one; call it before it is sent.

        The first use of a round always comes here, to begin the round; ``mode`` is
        looked at then only.

        Collective: none; keys in the store, and a bounded wait if a record is left.
        Raises: DesyncError, if another rank does something else.
        """
        if not self._open:
            self._begin(mode)
            if self.expected[self.position] == use:
                self.position += 1
                return
        if not self._recording:
            wanted = self.expected[self.position]
            self._entries = list(self.expected[: self.position])
            self.expected, self.position, self._recording = NOTHING, 0, True
            index = len(self._entries)
            self._leave_record(f"{self.round}/{index}", use, wanted)
        else:
            self._say(f"{self.round}/{len(self._entries)}", self.tell(use))
        self._entries.append(use)

    def end(self) -> None:
        """End the round, if one is open: fewer uses than recorded are a departure too.

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
            for peers in self.peers:
                peers.leave(f"{self.round}", said)
        self.drop()

    def drop(self) -> None:
        """Forget the round that is open, if any; the record stays as it was."""
        self._open = self._recording = False
        self._said = []
        self.expected, self.position = NOTHING, 0

    def _begin(self, mode: Hashable) -> None:
        self.round += 1
        self._open = True
        usual = self._last if self._run > 1 else None
        predicted = self._successors.get((self._last, self._run), usual)
        if predicted != mode:
            place, text = f"{self.round}/mode", self.tell_mode(mode)
            self._say(place, text)
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
        text = self.tell(use)
        self._say(place, text)
        since = self._recorded_in[self._last]
        self._meet(place, text, self.tell(wanted), since)

    def _say(self, place: str, text: str) -> None:
        self._said.append(place)
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
        """Wait until every rank has left the record for this use, too."""
        text, wanted = contrast(text, wanted)
        story = (
            f"In {self.what} {self.round}, at {_at(place)}, this rank {text}"
            f"{waiting(self.note(), wanted)}, where the order recorded in {self.what} "
            f"{since} has: {wanted}."
        )
        for peers in self.peers:
            peers.arrive(place)

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
    """Leave out parameters that both texts name: the others are what it is about.

    >>> contrast("reduces a, with none for x, y", "reduces a, with none for y")
    ('reduces a, with none for x', 'reduces a')
    """
    head, _, here = mine.partition(NO_GRADIENT)
    other_head, _, there = theirs.partition(NO_GRADIENT)
    if head != other_head:
        return mine, theirs
    return _less(head, here, there), _less(head, there, here)


def _less(head: str, names: str, others: str) -> str:
    known = others.split(", ")
    left = [name for name in names.split(", ") if name not in known]
    return f"{head}{NO_GRADIENT}{', '.join(left)}" if any(left) else head


def waiting(note: str, reduced: str) -> str:
    """Say why a rank does not reduce what another does: the gradients it waits for.

    >>> waiting("'a': 'a.x'", "reduces the gradients of 'a'")
    " and has no gradient yet for 'a.x'"
    """
    for line in note.splitlines():
        unit, _, names = line.partition(": ")
        if reduced.partition(NO_GRADIENT)[0] == REDUCES + unit:
            return f" and has no gradient yet for {names}"
    return ""


def _at(place: str) -> str:
    position = place.rpartition("/")[2]
    return "its beginning" if position == "mode" else f"use {position}"
