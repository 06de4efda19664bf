"""Communication with the other ranks of a group through c10d's key-value store.

The store outlives a restart by torchrun, with all keys of the attempt before. So the
first rank draws a name, and others believe only an answer to their own random number.
"""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from secrets import token_hex
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from composable_fsdp.comm.groups import PEERLESS
from composable_fsdp.errors import CompositionError, DesyncError
from composable_fsdp.naming import ranks_text

_MOST_VISITS = 4096
"""Visits to the store per second that all waiting ranks of a group make at most."""


def pauses(ranks: int) -> Iterator[float]:
    """Yield the seconds between visits of one of ``ranks`` that waits in the store."""
    # They grow: at first the rank must not lose time, and a rank that waits long must
    # not keep the store busy, which serves all ranks of the job, one after another.
    pause, longest = 0.0005, max(0.05, ranks / _MOST_VISITS)
    while True:
        yield pause
        pause = min(2 * pause, longest)


def key_value_store() -> Any:
    """Return the store that the default group was created with; do not keep it."""
    # Never cached: a reference would keep the threads of the store alive after
    # ``destroy_process_group``.
    return distributed_c10d._get_default_store()


class AgreedName:
    """The name of some global ranks in the store; empty until they have agreed."""

    def __init__(self, label: str, ranks: Sequence[int]) -> None:
        self._label, self._ranks, self._lock = label, tuple(ranks), Lock()
        # Other ranks may have the same label, and a rank of the attempt before may live
        # for a moment longer.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        which = f"{zlib.crc32(repr(self._ranks).encode()):08x}"
        self._base = f"composable_fsdp/names/{attempt}/{label}@{which}"
        # Kept after an exception: other ranks may have read it.
        self._drawn = token_hex(6)
        self._answered: dict[int, str] = {}
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
                store, own = key_value_store(), self._ranks.index(dist.get_rank())
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
        """Answer the ranks that have said hello; return the name once all have it."""
        name, others = self._drawn, range(1, len(self._ranks))
        late = False
        for rank in others:
            key = f"{self._base}/hello/{rank}"
            told = store.get(key).decode() if store.check([key]) else ""
            late |= told != name
            if told not in ("", name, self._answered.get(rank)):
                self._answered[rank] = told
                store.set(f"{self._base}/answer/{rank}", f"{told} {name}")
        if late:
            return ""
        for rank in others:
            store.delete_key(f"{self._base}/hello/{rank}")
            store.delete_key(f"{self._base}/answer/{rank}")
        return name

    def _read(self, store: Any, own: int) -> str:
        """Say hello; return the name that the first rank has answered, if it has."""
        key = f"{self._base}/hello/{own}"
        if not self._answered:
            store.set(key, self._drawn)
            self._answered[own] = ""
        if not store.check([f"{self._base}/answer/{own}"]):
            return ""
        # An answer to another number is that of the attempt before; the first rank of
        # this attempt replaces it once it has read this rank's number.
        told, _, name = store.get(f"{self._base}/answer/{own}").decode().partition(" ")
        if told != self._drawn:
            return ""
        store.set(key, name)
        return str(name)


def group_timeout(group: Any) -> float:
    """Return the smallest timeout of the group's backends, in seconds."""
    backends = [group._get_backend(device) for device in group._device_types]
    options: list[Any] = [getattr(each, "options", None) for each in backends]
    limits = [each._timeout for each in options if hasattr(each, "_timeout")]
    limit: timedelta = min(limits, default=distributed_c10d.default_pg_timeout)
    return limit.total_seconds()


TIMEOUT_VARIABLE = "COMPOSABLE_FSDP_ORDER_TIMEOUT"
"""Seconds to wait for other ranks in the store (0: none); else 0.9 of the timeout."""

_SHARE = 0.9
"""Default wait as a fraction of the group's timeout."""
_peers: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Number of ``Peers`` objects per group and topic."""


def can_compare(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of ``group`` are real and share a store."""
    if os.environ.get(TIMEOUT_VARIABLE) == "0":
        return False
    try:
        backend = dist.get_backend(group)
    except ValueError as error:
        raise CompositionError(
            "The process group of the model was destroyed (destroy_process_group), and "
            "the shards of other ranks cannot be reached. Save before a process group "
            "is destroyed, or shard the model over a new process group and load."
        ) from error
    return backend not in (*PEERLESS, "mpi")


class Peers:
    """The ranks of a group, which all make this object, for a message on ``topic``."""

    def __init__(self, group: dist.ProcessGroup, topic: str) -> None:
        # The n-th object of a group and topic is the same on each rank.
        counts = _peers.setdefault(group, Counter())
        counts[topic] += 1
        name = agreed_name(group).agree(seconds_to_wait(group))
        self._key = f"composable_fsdp/{name}/{topic}/{counts[topic]}"
        self._size = group.size()

    def say(self, value: Any) -> tuple[int, Any] | None:
        """Write ``value``; return the rank that was the first and its other value."""
        # Compared as JSON, in which a tuple is a list and NaN equals NaN. JSON has no
        # line feeds, so a line feed separates the value from the rest.
        mine = json.dumps(value)
        text = f"{mine}\n{dist.get_rank()}"
        # ``compare_set`` with an empty expected value writes only if the key does not
        # exist, and returns the stored text.
        first = key_value_store().compare_set(f"{self._key}/said", "", text).decode()
        told, _, rank = first.rpartition("\n")
        # Usually equal: a text is parsed only for an error.
        return None if told == mine else (int(rank), json.loads(told))

    def share(self, text: str | None, within: float, *, said: bool) -> str | None:
        """Return the first text that a rank gives within the time, on all that come."""
        store, key, size = key_value_store(), f"{self._key}/counts", self._size
        if text is not None:
            store.compare_set(f"{self._key}/text", "", text)
        # A single integer holds the numbers of ranks that came, that gave a text, which
        # they wrote before, and that left.
        width = size.bit_length()
        start, between = time.monotonic(), pauses(size)
        counts = int(store.add(key, 1 + ((text is not None) << width)))
        while counts % (1 << width) < size and time.monotonic() - start < within:
            time.sleep(next(between))
            # Not ``add``: a FileStore grows by each.
            counts = int(store.get(key))
        used = [key, *([f"{self._key}/said"] if said else [])]
        if (counts >> width) % (1 << width):
            used.append(f"{self._key}/text")
            text = store.get(used[-1]).decode()
        if store.add(key, 1 << 2 * width) >> 2 * width == size:
            for each in used:
                store.delete_key(each)
        return text


def agreed_name(group: dist.ProcessGroup) -> AgreedName:
    """Return the name of the group, which no other processes have in this store."""
    found = _names.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        found = _names.setdefault(group, AgreedName(group.group_name, ranks))
    return found


_names: WeakKeyDictionary[dist.ProcessGroup, AgreedName] = WeakKeyDictionary()


def seconds_to_wait(group: dist.ProcessGroup) -> float:
    """Return the number of seconds that a rank waits for other ranks of ``group``."""
    asked = os.environ.get(TIMEOUT_VARIABLE)
    return float(asked) if asked else _SHARE * group_timeout(group)


def own_connection() -> Any:
    """Return a new connection to the store of the default group, for a thread."""
    # A connection of its own: requests of the main thread never wait behind a request
    # of this thread, and a request that fails breaks no connection of torch.
    store: Any = distributed_c10d._get_default_store()
    # Other stores have no connection, and a second ``FileStore`` counts as a rank.
    if _host_of(store) is not None:
        store = store.clone()
        store.set_timeout(timedelta(seconds=5))
    return store


def _host_of(store: Any) -> tuple[str, int] | None:
    """Return the address of the host of a store; None if the store has no host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def is_there(store: Any) -> bool:
    """Return whether the host of the store can still be reached."""
    # A visit to a host that has gone would print a back-trace of C++ at a normal end.
    host = _host_of(store)
    try:
        if host is not None:
            socket.create_connection(host, 2.0).close()
    except OSError:
        return False
    return True
