"""Communication with the other ranks of a group through c10d's key-value store.

The store is one-sided: a rank writes and reads keys without any action of its peers, so
two ranks that are about to send different collectives can detect the difference
before::

    say      the first rank at a place writes; later ranks read who wrote which value
    tally    wait for all ranks; the number of ranks that have set a flag
    leave    the last rank to leave removes the keys

Ranks that come to the same place anyway exchange tags and objects by collectives, which
need no store: ``gather_tags``, ``gather_objects``.

Private name, checked on torch 2.13 and 2.11: ``distributed_c10d._get_default_store``.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.nodes import PEERLESS, group_timeout
from composable_fsdp.comm.store_names import AgreedName, default_store, pauses
from composable_fsdp.errors import CompositionError

TIMEOUT_VARIABLE = "COMPOSABLE_FSDP_ORDER_TIMEOUT"
"""Environment variable: seconds to wait for other ranks in the store; 0 switches all
comparisons off.

Default: 0.9 times the group's timeout, so that a DesyncError is raised before the
backend aborts a collective that waits for a missing rank."""

_store = default_store
_SHARE = 0.9
"""Default wait as a fraction of the group's timeout."""
_finished: WeakKeyDictionary[dist.ProcessGroup, list[str]] = WeakKeyDictionary()
"""Keys of the last tally over a group, which the next tally removes."""
_peers: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Number of ``Peers`` objects per group and topic that have a number."""


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
    """The first message at a place: the rank that wrote it, and the value.

    As JSON returns them, which has lists and no tuples, and strings as keys of dicts.
    """

    rank: int
    value: Any


def _parse(text: str) -> PeerMessage:
    """Return the message that ``Peers.say`` has written as ``text``."""
    value, _, rank = text.partition("\n")
    return PeerMessage(int(rank), json.loads(value))


class Peers:
    """The ranks of a group, for messages about ``topic``."""

    __slots__ = ("__weakref__", "_group", "_number", "_prefix", "_rank", "_topic")

    def __init__(self, group: dist.ProcessGroup, topic: str) -> None:
        self._group = GroupRef(group)
        self._topic = topic
        # The number is chosen at the first use of the store: at that time all ranks are
        # on the way to the same collective, so the n-th ``Peers`` object of a group and
        # topic is the same on each rank.
        self._number, self._prefix, self._rank = 0, "", dist.get_rank()

    def name(self) -> Peers:
        """Choose the number of this object now; return this object.

        For a caller that all ranks enter, whether or not they use the store later.
        """
        # The name of the group would wait for ranks that may not use the store yet.
        counts = _peers.setdefault(self._group.get(), Counter())
        counts[self._topic] += 1
        self._number = counts[self._topic]
        return self

    @property
    def group(self) -> dist.ProcessGroup:
        """The group. Raises: PhaseError, if the group was destroyed."""
        return self._group.get()

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group, in group rank order."""
        return dist.get_process_group_ranks(self._group.get())

    def gather_tags(self, tag: int) -> list[int]:
        """Return the tags of all ranks, numbers of 63 bits, in group rank order.

        Collective: an all-gather of 8 bytes over the group.
        """
        return collectives.all_gather_tag(tag, self._group.get())

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in group rank order.

        Collective: an all-gather of objects over the group.
        """
        return collectives.all_gather_object(value, self._group.get())

    def say(self, place: str, value: Any) -> PeerMessage | None:
        """Write ``value`` at ``place``, unless another rank has written there before.

        One round trip to the store; waits for no rank.

        Returns: the message of the first rank if its value differs; else None.
        """
        # Compared as JSON, in which a tuple is a list and NaN equals NaN. JSON has no
        # line feeds, so a line feed separates the value from the rest.
        mine = json.dumps(value)
        text = f"{mine}\n{self._rank}"
        # ``compare_set`` with an empty expected value writes only if the key does not
        # exist, and returns the stored text.
        first = _store().compare_set(self._key(place), "", text).decode()
        # Usually equal: a text is parsed only for an error.
        return None if first.startswith(mine + "\n") else _parse(first)

    def heard(self, place: str) -> Any:
        """Return the first value at ``place``, or ``None``; waits for no rank."""
        store, key = _store(), self._key(place)
        if not store.check([key]):
            return None
        return _parse(store.get(key).decode()).value

    def tally(
        self, place: str, flags: Sequence[bool], within: float
    ) -> list[int] | None:
        """Count this rank and its ``flags`` at ``place``; wait until all ranks have.

        One round trip, and a visit after each of ``pauses`` while ranks are missing.

        Returns: per flag, the number of ranks that have set the flag; None if ranks are
            missing, which do not count this rank either then.
        """
        store, group, key = _store(), self._group.get(), f"{self._key(place)}/tally"
        size = group.size()
        # A single integer of the store holds all counts, a field each: a rank that has
        # read the last arrival has read the flags of all ranks, too.
        width = size.bit_length()
        mine = 1 + sum(flag << n * width for n, flag in enumerate(flags, 1))
        field = (1 << width) - 1
        start, between = time.monotonic(), pauses(size)
        counts = int(store.add(key, mine))
        try:
            while counts & field < size and time.monotonic() - start < within:
                time.sleep(next(between))
                # Not ``add``: a FileStore grows by each.
                counts = int(store.get(key))
        # Ctrl-C, too: other ranks must not rely on this one.
        except BaseException:
            store.add(key, -mine)
            raise
        if counts & field < size:
            counts = int(store.add(key, -mine))
            if counts & field < size - 1:
                return None
            # The last rank has come in between, and relies on this rank.
            counts = int(store.add(key, mine))
        # A rank that came here has read the tally before.
        stale = _finished.get(group, [])
        _finished[group] = [key]
        if group.rank() == 0:
            for each in stale:
                store.delete_key(each)
        return [counts >> n * width & field for n in range(1, len(flags) + 1)]

    def drop_later(self, *places: str) -> None:
        """Remove the flags at ``places`` after the next tally over the group."""
        _finished[self._group.get()] += [self._key(place) for place in places]

    def leave(self, where: str, places: Iterable[str]) -> None:
        """Declare ``places`` finished on this rank; the last rank removes the keys."""
        store, key = _store(), self._key(where)
        if store.add(f"{key}/left", 1) < self._group.get().size():
            return
        store.delete_key(f"{key}/left")
        for place in places:
            store.delete_key(self._key(place))

    def _key(self, place: str) -> str:
        """Return the key of ``place``; choose the prefix at the first call."""
        if not self._prefix:
            number = self._number or self.name()._number
            name = name_in_store(self._group.get())
            self._prefix = f"composable_fsdp/{name}/{self._topic}/{number}"
        return f"{self._prefix}/{place}"


def name_in_store(group: dist.ProcessGroup) -> str:
    """Return a name of the group that no other processes have used in this store.

    The first call for a group waits for all its ranks.

    Raises: DesyncError, if a rank does not come within ``seconds_to_wait``.
    """
    return agreed_name(group).agree(seconds_to_wait(group))


def agreed_name(group: dist.ProcessGroup) -> AgreedName:
    """Return what ``name_in_store`` returns the name of; waits for no rank."""
    found = _names.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        found = _names[group] = AgreedName(group.group_name, ranks)
    return found


_names: WeakKeyDictionary[dist.ProcessGroup, AgreedName] = WeakKeyDictionary()


def seconds_to_wait(group: dist.ProcessGroup) -> float:
    """Return the number of seconds that a rank waits for other ranks of ``group``."""
    asked = os.environ.get(TIMEOUT_VARIABLE)
    return float(asked) if asked else _SHARE * group_timeout(group)


def key_value_store() -> Any:
    """Return the store that the default group was created with; do not keep it."""
    return _store()


def own_connection() -> Any:
    """Return a new connection to the store of the default group, for a thread."""
    # A connection of its own: requests of the main thread never wait behind a request
    # of this thread, and a request that fails breaks no connection of torch.
    store: Any = distributed_c10d._get_default_store()
    # Other stores have no connection, and a second ``FileStore`` counts as a rank.
    if not isinstance(innermost(store), TCPStore):
        return store
    store = store.clone()
    store.set_timeout(timedelta(seconds=5))
    return store


def innermost(store: Any) -> Any:
    """Return the store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def is_there(store: Any) -> bool:
    """Return whether the host of the store can still be reached."""
    # A visit to a host that has gone would print a back-trace of C++ at a normal end.
    below = innermost(store)
    if not hasattr(below, "port"):
        return True
    try:
        socket.create_connection((below.host, below.port), 2.0).close()
    except OSError:
        return False
    return True
