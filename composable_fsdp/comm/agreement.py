"""The other ranks of a group, as one meets them in the key-value store of c10d.

The store is one-sided: a rank writes and reads keys whether or not its peers come by,
so two ranks that are about to send different things can tell before they do::

    say     first writer of a place wins; the others learn who it was and what it said
    arrive  count this rank in at a place; ``missing`` waits, bounded, for the others
    leave   the last rank to leave removes the keys

No collective is sent. Private names, checked on torch 2.13 and 2.11:
``distributed_c10d._get_default_store``, ``ProcessGroup._get_backend`` and
``_device_types``, ``options._timeout`` of a backend.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from composable_fsdp.comm.groups import GroupRef

TIMEOUT_VARIABLE = "COMPOSABLE_FSDP_ORDER_TIMEOUT"
"""Seconds to wait for ranks that have to change their order too; 0 compares nothing.

Default: nine tenths of the group's timeout, so that ranks which wait longer than a
collective may are told before the backend gives up.
"""

NOTICE_AFTER = 10.0
"""Seconds in ``missing`` after which the caller may tell what it waits for."""

_SHARE = 0.9
_NOTE = "\n"
_roots: Counter[str] = Counter()


def can_compare(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of ``group`` are real and share a store. Asks nobody."""
    if os.environ.get(TIMEOUT_VARIABLE) == "0":
        return False
    return dist.get_backend(group) not in ("fake", "mpi")


class PeerMessage(NamedTuple):
    """What a rank said at a place, and the note that it left there."""

    rank: int
    text: str
    note: str


class Peers:
    """The ranks of one group; ``topic`` keeps what they say of one matter apart.

    The name in the store is drawn at the first use: by then all ranks are on their way
    to a collective, so the first, second .. user of a group is the same on each.
    """

    __slots__ = ("_group", "_prefix", "_rank", "_topic")

    def __init__(self, group: dist.ProcessGroup, topic: str) -> None:
        self._group = GroupRef(group)
        self._topic = topic
        self._prefix, self._rank = "", dist.get_rank()

    def say(self, place: str, text: str, note: str = "") -> PeerMessage | None:
        """Say ``text`` at ``place``; what a peer said first, if that is something else.

        ``note`` goes along and is not compared. One round trip to the store; waits for
        nobody.
        """
        mine = f"{self._rank} {text}{_NOTE}{note}"
        key = self._key(place)
        # An empty expected value means: only if nobody has written here.
        first = bytes(_store().compare_set(key, "", mine)).decode()
        rank, _, rest = first.partition(" ")
        said, _, noted = rest.partition(_NOTE)
        return None if said == text else PeerMessage(int(rank), said, noted)

    def heard(self, place: str) -> str | None:
        """What was said at ``place`` first; ``None`` if nothing. Waits for nobody."""
        store, key = _store(), self._key(place)
        if not store.check([key]):
            return None
        _, _, rest = bytes(store.get(key)).decode().partition(" ")
        return rest.partition(_NOTE)[0]

    def arrive(self, place: str, expected: int | None = None) -> None:
        """Count this rank in at ``place``; the last one opens it. Waits for nobody.

        ``expected`` ranks come, all of the group if it is None.
        """
        store, key = _store(), self._key(place)
        store.append(f"{key}/here", f"{self._rank} ")
        count = self._group.get().size() if expected is None else expected
        if store.add(f"{key}/count", 1) == count:
            store.set(f"{key}/open", "1")

    def all_arrived(self, place: str, within: float) -> bool:
        """Wait until ``place`` is open, for so many seconds; whether it is."""
        store, key = _store(), f"{self._key(place)}/open"
        start, pause = time.monotonic(), 0.0005
        while not store.check([key]):
            if time.monotonic() - start > within:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def missing(self, place: str, notice: Callable[[list[int]], None]) -> list[int]:
        """Wait until all ranks have arrived at ``place``; ranks that did not, in time.

        ``notice`` is called once with them when the wait gets long.
        """
        store, key = _store(), self._key(place)
        start, pause, told = time.monotonic(), 0.0005, False
        # Asked again and again, because a blocking wait would hold the connection that
        # other threads of this process share.
        while not store.check([f"{key}/open"]):
            waited = time.monotonic() - start
            if waited > self.timeout():
                return self._absent(key)
            if not told and waited > NOTICE_AFTER:
                told = True
                notice(self._absent(key))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return []

    def _absent(self, key: str) -> list[int]:
        here = set(map(int, bytes(_store().get(f"{key}/here")).split()))
        everyone = dist.get_process_group_ranks(self._group.get())
        return [rank for rank in everyone if rank not in here]

    def leave(self, where: str, places: Iterable[str]) -> None:
        """Say that this rank is through with ``places``; the last one removes them."""
        store, key = _store(), self._key(where)
        if store.add(f"{key}/left", 1) < self._group.get().size():
            return
        store.delete_key(f"{key}/left")
        for place in places:
            self.remove(place)

    def remove(self, place: str) -> None:
        """Remove the keys of ``place``, to which nobody will come any more."""
        store, key = _store(), self._key(place)
        store.delete_key(key)  # nothing is here, if ranks only arrived
        if store.check([f"{key}/count"]):
            for part in ("here", "count", "open"):
                store.delete_key(f"{key}/{part}")

    def timeout(self) -> float:
        """Seconds that ``missing`` waits."""
        asked = os.environ.get(TIMEOUT_VARIABLE)
        return float(asked) if asked else _SHARE * _group_timeout(self._group.get())

    def _key(self, place: str) -> str:
        if not self._prefix:
            group = self._group.get()
            # Groups of disjoint ranks may bear one name.
            first = dist.get_global_rank(group, 0)
            name = f"{group.group_name}@{first}/{self._topic}"
            _roots[name] += 1
            self._prefix = f"composable_fsdp/{name}/{_roots[name]}"
        return f"{self._prefix}/{place}"


def _store() -> Any:
    """The store that the default group was made with.

    Fetched each time: whoever kept it would keep its threads beyond
    ``destroy_process_group``.
    """
    return distributed_c10d._get_default_store()


def _group_timeout(group: Any) -> float:
    limits = [distributed_c10d.default_pg_timeout]
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            limits.append(options._timeout)
    return min(limits[1:] or limits).total_seconds()
