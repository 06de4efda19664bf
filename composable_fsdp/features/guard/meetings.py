"""Calls meet before they send: all ranks make the same call, or each raises.

``if rank == 0: save(...)`` would send on one rank: its collective pairs with the next
collective of the other ranks, which aborts the process, mixes values, or waits without
end. So a call that needs all ranks of a group announces itself in the key-value store,
and waits for a limited time until every rank has announced an equal call::

    this rank announces      the others            result
    save()                   save()                the calls go on
    save()                   load()                DesyncError on all that have come
    save()                   nothing               DesyncError after the time limit

Training repeats its calls, so a call that follows the same calls as before can be
*expected*: with ``always=False`` an expected call visits no store. All ranks have equal
histories, so all ranks expect the same call; a rank that makes another call announces
it, and waits for ranks that do not come. The forwards of the trees are part of the
history (``call_order.CallOrder``), so a rank that leaves an expected call out is
noticed at its next forward. A rank that leaves the recorded order of units comes to the
same meetings (``order_compare``).

A meeting has two keys::

    here    a line of JSON per rank that came or gave up
    sum     number of ranks, and the sum of the digests of their calls

If the sum is that of equal digests, no rank reads ``here``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable_fsdp.comm import agreement
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import operation_log
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.call_order import CallOrder
from composable_fsdp.features.guard.watch import StoreWait, agree_on_name

_numbers: Counter[str] = Counter()
"""Number of meetings per group that this rank has been at, by the group's name."""


class Announced(Protocol):
    """What a rank comes to a meeting with."""

    @property
    def told(self) -> str:
        """What the rank does, for the error of ranks that do something else."""

    @property
    def facts(self) -> Any:
        """What else is compared; JSON returns it."""

    @property
    def predicate(self) -> str:
        """What the rank does while it waits."""

    @property
    def way_out(self) -> str:
        """The last sentences of an error."""

    def alone(self, why: str) -> str:
        """Return the error of this rank if the others do not come."""

    def unlike(self, here: Mapping[int, tuple[str, Any]]) -> str:
        """Return the error if ranks differ, by ``told`` and ``facts`` of each."""


def meet_in_store(
    groups: Iterable[dist.ProcessGroup], call: Call, *, always: bool
) -> None:
    """Do as ``comm.meeting.meet``."""
    # One group after the other, in the same order on all ranks: a rank that raised at
    # the first group is missing at the second, whose ranks then raise, too.
    for group in groups:
        if agreement.can_compare(group):
            history_of(group).meet(call, always=always)


def history_of(group: dist.ProcessGroup) -> History:
    """Return the meetings over ``group``, one object per group."""
    # By the object and not by the name: a group that was destroyed and made again has a
    # new history on all ranks.
    found = _histories.get(group)
    if found is None:
        found = _histories[group] = History(group)
    return found


class History:
    """The meetings over a group."""

    __slots__ = ("__weakref__", "_group", "_stale", "order")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = GroupRef(group)
        self.order = CallOrder()
        self._stale: list[str] = []
        """Prefixes of keys of meetings that have ended."""

    def meet(self, call: Call, *, always: bool) -> None:
        """Wait for equal calls of all ranks, and note the call; see ``meet``."""
        # An expected call needs no announcement: a rank that makes another call instead
        # announces that call, and waits for this rank.
        if always or self.order.expected() != call:
            self.gather(call)
        self.order.note(call)

    def begin_forward(self, number: int, call: Call) -> None:
        """Note that order log ``number`` begins a round, which is the forward ``call``.

        Meets all ranks if this rank has left an expected call out.
        Raises: DesyncError, if other ranks have not.
        """
        # The order logs compare rounds. Only a call that other ranks are inside, and
        # wait in for this rank, is compared here.
        order = self.order
        if type(order.following.get(order.place, number)) is not int:
            self.gather(call)
        order.note(number)

    def gather(self, call: Announced) -> None:
        """Meet all ranks of the group in the store.

        Raises: DesyncError.
        """
        group, usual = self._group.get(), self.order.expected()
        operation_log(group).threads.add(get_ident())
        if why := agree_on_name(group, call.predicate):
            raise _alone(call, why, usual)
        # A caught error on one rank leaves another history there, and such a rank would
        # not expect what the others do. So the ranks compare histories, too.
        digest = hashlib.blake2b(
            repr((call.told, call.facts, self._known())).encode()
        ).digest()
        meeting = _Meeting(group, call, int.from_bytes(digest[:8], "big"))
        error: DesyncError | None = None
        try:
            meeting.arrive()
            with StoreWait(group, call.predicate, call.way_out) as wait:
                # Before all ranks are here: ranks that differ need not wait for others.
                while not (error := meeting.difference()) and meeting.is_awaited():
                    why = wait.pause(meeting.missing)
                    # The last rank may have come in between.
                    if why and meeting.gives_up():
                        raise _alone(call, why, usual)
                    meeting.look()
        # What was announced is taken back on any exception, as Ctrl-C: other ranks must
        # not rely on this one.
        except BaseException:
            with suppress(RuntimeError):
                if not meeting.gives_up():
                    self._end(meeting)
            raise
        # Also after a difference: a rank that comes later finds the announcements of
        # this meeting, raises the same error, and is then at the next meeting, too.
        self._end(meeting)
        if error is not None:
            # Where all ranks raise, a program that catches the error may go on.
            error.is_known_to_all = not meeting.is_awaited()
            raise error
        if not meeting.is_equal():
            # Only the histories differ, and all ranks forget theirs: they expect alike
            # again, and the next steps meet in the store.
            self.order.forget()
        # Every rank is here, so no rank reads keys of a meeting before.
        stale, self._stale = self._stale[:-1], self._stale[-1:]
        # A key each, so that no rank has more requests than the others by two.
        key = {0: "here", 1: "sum"}.get(group.rank())
        if key is not None:
            store = agreement.key_value_store()
            for prefix in stale:
                store.delete_key(f"{prefix}/{key}")

    def _end(self, meeting: _Meeting) -> None:
        """Count the meeting: the next one has other keys."""
        _numbers[meeting.name] += 1
        self._stale.append(meeting.prefix)

    def _known(self) -> list[Any]:
        """Return the history in the form in which ranks compare it."""
        order = self.order
        pairs = [(*place, event) for place, event in order.following.items()]  # type: ignore[misc]  # places are tuples
        return [tuple(map(_shown, each)) for each in (order.place, *pairs)]


_histories: WeakKeyDictionary[dist.ProcessGroup, History] = WeakKeyDictionary()


def _shown(part: Any) -> Any:
    """Return a part of a history as ranks compare it."""
    return part.story if isinstance(part, Call) else part


def _alone(call: Announced, why: str, usual: object) -> DesyncError:
    """Return the error of a rank that gives up; ``usual`` is the expected call."""
    # The other ranks may be inside the expected call, which visits no store.
    instead = ""
    if type(usual) is Call and usual != call:
        instead = f" The call that usually comes here is {usual.story}."
    return DesyncError(call.alone(f"{why.rstrip('.')}.{instead}".rstrip(".")))


class _Meeting:
    """The keys of one meeting, and what this rank knows of them."""

    __slots__ = (
        "_announced",
        "_call",
        "_group",
        "_one",
        "_shift",
        "_sum",
        "name",
        "prefix",
    )

    def __init__(self, group: dist.ProcessGroup, call: Announced, digest: int) -> None:
        self._group, self._call = group, call
        self.name = agreement.name_in_store(group)
        self.prefix = f"composable_fsdp/meeting/{self.name}/{_numbers[self.name] + 1}"
        # The low bits of the sum count the ranks; the sum of all digests must fit into
        # the other bits of the store's integers, which have 63 and a sign.
        self._shift = group.size().bit_length()
        self._one = 1 + (digest % (1 << (62 - 2 * self._shift)) << self._shift)
        self._sum, self._announced = 0, False

    def arrive(self) -> None:
        """Announce this rank. Two round trips."""
        # The line comes first: every rank in the sum has a line.
        self._write(gave_up=False)
        # Before the sum: after a signal between the two, this rank must not be counted.
        self._announced = True
        self._add(self._one)

    def look(self) -> None:
        """Read which ranks are here. One round trip."""
        # Not ``add``: a FileStore grows by each.
        store = agreement.key_value_store()
        self._sum = int(store.get(f"{self.prefix}/sum"))

    def gives_up(self) -> bool:
        """Take the announcement back, unless all ranks have come at this moment."""
        # The line first, as in ``arrive``: a rank that reads the lines may miss this
        # rank a moment too early, and never counts a rank that has left.
        self._write(gave_up=True)
        # Only once: an exception may follow the error of a rank that has given up.
        if self._announced:
            self._announced = False
            self._add(-self._one)
            if self._count() == self._group.size() - 1:
                # The last rank has come in between and relies on this rank.
                self.arrive()
                return False
        return True

    def is_awaited(self) -> bool:
        """Return whether ranks are missing, as far as this rank knows."""
        return self._count() < self._group.size()

    def is_equal(self) -> bool:
        """Return whether the ranks that are here have equal calls and histories."""
        return self._sum == self._count() * self._one

    def difference(self) -> DesyncError | None:
        """Return the error if ranks have announced different calls."""
        if self.is_equal():
            return None
        # By what is compared itself: if all do the same, only their histories differ.
        here = self._present()
        if len({json.dumps(each) for each in here.values()}) < 2:
            return None
        return DesyncError(self._call.unlike(here))

    def missing(self) -> list[int]:
        """Return the global ranks that have not come, as the store says now."""
        self.look()
        if not self.is_awaited():
            return []
        here = {dist.get_rank(), *self._present()}
        everyone = dist.get_process_group_ranks(self._group)
        return [rank for rank in everyone if rank not in here]

    def _present(self) -> dict[int, tuple[str, Any]]:
        """Return what each rank does that is here, by global rank."""
        store = agreement.key_value_store()
        # In the order of the lines: a rank may give up and come again.
        found: dict[int, tuple[str, Any]] = {}
        for line in bytes(store.get(f"{self.prefix}/here")).decode().splitlines():
            rank, told, facts, gave_up = json.loads(line)
            if gave_up:
                found.pop(rank, None)
            else:
                found[rank] = told, facts
        return found

    def _write(self, *, gave_up: bool) -> None:
        """Append a line about this rank."""
        line = json.dumps([dist.get_rank(), self._call.told, self._call.facts, gave_up])
        agreement.key_value_store().append(f"{self.prefix}/here", f"{line}\n")

    def _add(self, number: int) -> None:
        """Add to the sum, and read it."""
        store = agreement.key_value_store()
        self._sum = int(store.add(f"{self.prefix}/sum", number))

    def _count(self) -> int:
        """Return the number of ranks in the sum."""
        return self._sum & ((1 << self._shift) - 1)
