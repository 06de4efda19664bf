"""Names in the key-value store that only the processes of this moment share.

The store of torchrun outlives its workers: after a restart it holds all keys of the
attempt before, and groups have the same names again. So the first rank draws a name,
and every other rank believes only an answer to the number that it has drawn itself::

    hello/R     the number of rank R
    answer/R    the number of rank R that the first rank has read, and the name
    NAME        how many ranks have read the name
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from secrets import token_hex
from threading import Lock
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from composable_fsdp.errors import DesyncError
from composable_fsdp.naming import ranks_text

_MOST_VISITS = 4096
"""Visits to the store per second that all waiting ranks of a group make at most."""


def pauses(ranks: int) -> Iterator[float]:
    """Yield the seconds between visits of one of ``ranks`` that waits in the store.

    >>> from itertools import islice
    >>> [list(islice(pauses(ranks), 20))[-1] for ranks in (8, 1024)]
    [0.05, 0.25]
    """
    # They grow: at first the rank must not lose time, and a rank that waits long must
    # not keep the store busy, which serves all ranks of the job, one after another.
    pause, longest = 0.0005, max(0.05, ranks / _MOST_VISITS)
    while True:
        yield pause
        pause = min(2 * pause, longest)


def default_store() -> Any:
    """Return the store that the default group was created with; do not keep it."""
    # Never cached: a reference would keep the threads of the store alive after
    # ``destroy_process_group``.
    return distributed_c10d._get_default_store()


class AgreedName:
    """The name of some global ranks in the store; empty until they have agreed."""

    __slots__ = ("_answered", "_base", "_drawn", "_label", "_lock", "_ranks", "name")

    def __init__(self, label: str, ranks: Sequence[int]) -> None:
        self._label, self._ranks, self._lock = label, tuple(ranks), Lock()
        # Other ranks may have the same label, and a rank of the attempt before may live
        # for a moment longer.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        which = f"{zlib.crc32(repr(self._ranks).encode()):08x}"
        self._base = f"composable_fsdp/names/{attempt}/{label}@{which}"
        # Kept after an exception: other ranks may have read it.
        self._drawn = token_hex(6)
        self._answered: dict[int, bytes] = {}
        self.name = "" if len(self._ranks) > 1 else f"{label}@{self._drawn}"

    def agree(self, limit: float) -> str:
        """Return the name; wait at most ``limit`` seconds. Raises: DesyncError."""
        start, between = time.monotonic(), pauses(len(self._ranks))
        while not self.name and not self.step():
            if time.monotonic() - start > limit:
                raise DesyncError(
                    f"Rank {dist.get_rank()} uses process group {self._label!r} for "
                    f"the first time, and {ranks_text(self.missing())} did not come "
                    f"within {limit:g} s. Make the same calls in the same order on "
                    "every rank."
                )
            time.sleep(next(between))
        return self.name

    def step(self) -> bool:
        """Say hello, or answer; return whether the ranks have agreed. Never waits."""
        # Threads of a rank may come together: the second would find no key any more.
        with self._lock:
            if not self.name:
                store, own = default_store(), self._ranks.index(dist.get_rank())
                name = self._read(store, own) if own else self._answer(store)
                self.name = f"{self._label}@{name}" if name else ""
        return bool(self.name)

    def missing(self) -> list[int]:
        """Return the global ranks for which this rank waits; empty after the end."""
        if self.name:
            return []
        told = {0, *self._answered}
        late = [rank for i, rank in enumerate(self._ranks) if i not in told]
        return late if self._ranks[0] == dist.get_rank() else [self._ranks[0]]

    def _answer(self, store: Any) -> str:
        """Answer the ranks that have said hello; return the name after the last."""
        others, counter = range(1, len(self._ranks)), f"{self._base}/{self._drawn}"
        for rank in others:
            if store.check([f"{self._base}/hello/{rank}"]):
                drawn = store.get(f"{self._base}/hello/{rank}")
                if self._answered.get(rank) != drawn:
                    self._answered[rank] = drawn
                    name = f" {self._drawn}".encode()
                    store.set(f"{self._base}/answer/{rank}", drawn + name)
        # Not ``add``: a FileStore grows by each.
        read = int(store.get(counter)) if store.check([counter]) else 0
        if read < len(others):
            return ""
        for rank in others:
            store.delete_key(f"{self._base}/hello/{rank}")
            store.delete_key(f"{self._base}/answer/{rank}")
        store.delete_key(counter)
        return self._drawn

    def _read(self, store: Any, own: int) -> str:
        """Say hello; return the name that the first rank has answered, if it has."""
        if not self._answered:
            store.set(f"{self._base}/hello/{own}", self._drawn)
            self._answered[own] = b""
        if not store.check([f"{self._base}/answer/{own}"]):
            return ""
        # An answer to another number is that of the attempt before; the first rank of
        # this attempt replaces it once it has read this rank's number.
        drawn, _, name = store.get(f"{self._base}/answer/{own}").decode().partition(" ")
        if drawn != self._drawn:
            return ""
        store.add(f"{self._base}/{name}", 1)
        return str(name)
