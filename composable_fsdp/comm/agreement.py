"""Communication with the other ranks of a group through c10d's key-value store.

The store is one-sided: a rank writes and reads keys without any action of its peers, so
two ranks that are about to send different collectives can detect the difference before.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from composable_fsdp.comm.groups import PEERLESS, GroupRef
from composable_fsdp.comm.nodes import group_timeout
from composable_fsdp.comm.store_names import AgreedName, default_store, pauses
from composable_fsdp.errors import CompositionError

TIMEOUT_VARIABLE = "COMPOSABLE_FSDP_ORDER_TIMEOUT"
"""Environment variable: seconds to wait for other ranks in the store; 0 switches all
comparisons off.

Default: 0.9 times the group's timeout, so that a DesyncError is raised before the
backend aborts a collective that waits for a missing rank."""

key_value_store = default_store
_SHARE = 0.9
"""Default wait as a fraction of the group's timeout."""
_peers: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Number of ``Peers`` objects per group and topic."""


def can_compare(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of ``group`` are real and share a store.

    Raises: CompositionError, if ``group`` was destroyed.
    """
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


class PeerMessage(NamedTuple):
    """The first message at a place, as JSON returns it: without tuples."""

    rank: int
    value: Any


class Peers:
    """The ranks of a group, which all make this object, for messages on ``topic``."""

    __slots__ = ("_group", "_topic")

    def __init__(self, group: dist.ProcessGroup, topic: str) -> None:
        self._group = GroupRef(group)
        # The n-th object of a group and topic is the same on each rank.
        counts = _peers.setdefault(group, Counter())
        counts[topic] += 1
        self._topic = f"{topic}/{counts[topic]}"

    def say(self, place: str, value: Any) -> PeerMessage | None:
        """Write ``value`` at ``place``; return another value of an earlier rank."""
        # Compared as JSON, in which a tuple is a list and NaN equals NaN. JSON has no
        # line feeds, so a line feed separates the value from the rest.
        mine = json.dumps(value)
        text = f"{mine}\n{dist.get_rank()}"
        # ``compare_set`` with an empty expected value writes only if the key does not
        # exist, and returns the stored text.
        first = key_value_store().compare_set(self._key(place), "", text).decode()
        told, _, rank = first.rpartition("\n")
        # Usually equal: a text is parsed only for an error.
        return None if told == mine else PeerMessage(int(rank), json.loads(told))

    def share(
        self, place: str, text: str | None, within: float, also: Sequence[str] = ()
    ) -> str | None:
        """Return the first text that a rank gives at ``place``, on all ranks.

        Goes by the ranks that come ``within`` seconds; removes the places ``also``.
        """
        store, key, size = key_value_store(), self._key(place), self._group.get().size()
        if text is not None:
            self.say(f"{place}/text", text)
        # A single integer holds the numbers of ranks that came, that gave a text, which
        # they wrote before, and that left.
        width = size.bit_length()
        start, between = time.monotonic(), pauses(size)
        counts = int(store.add(key, 1 + ((text is not None) << width)))
        while counts % (1 << width) < size and time.monotonic() - start < within:
            time.sleep(next(between))
            # Not ``add``: a FileStore grows by each.
            counts = int(store.get(key))
        used = [place, *also]
        if (counts >> width) % (1 << width):
            used.append(f"{place}/text")
            told = store.get(self._key(used[-1])).decode()
            text = json.loads(told.rpartition("\n")[0])
        # The last rank removes the keys.
        if store.add(key, 1 << 2 * width) >> 2 * width == size:
            for each in map(self._key, used):
                store.delete_key(each)
        return text

    def _key(self, place: str) -> str:
        group = self._group.get()
        name = agreed_name(group).agree(seconds_to_wait(group))
        return f"composable_fsdp/{name}/{self._topic}/{place}"


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
