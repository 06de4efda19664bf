"""What ranks leave in the key-value store."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from composable_fsdp.comm import agreement
from tests.support.world import World


@pytest.mark.parametrize("said", [True, False])
def test_the_last_rank_to_leave_takes_the_keys_with_it(
    one_rank: World, monkeypatch: pytest.MonkeyPatch, *, said: bool
) -> None:
    """Also those of a place where ranks only arrived. A FileStore says of any key that
    it was deleted, a HashStore and a TCPStore only of one that was there."""
    store = HashStore()
    monkeypatch.setattr(agreement, "_store", lambda: store)
    assert dist.group.WORLD is not None
    peers = agreement.Peers(dist.group.WORLD, "topic")

    if said:
        peers.say("place", "text")
    peers.arrive("place")
    peers.leave("left", ["place"])

    assert store.num_keys() == 0


class _Two:
    """A process group of two ranks, of which the test plays the other."""

    group_name = "two"

    def size(self) -> int:
        """Return 2."""
        return 2

    def rank(self) -> int:
        """Return 0: this rank removes keys."""
        return 0


@pytest.fixture
def two(one_rank: World, monkeypatch: pytest.MonkeyPatch) -> agreement.Peers:
    """Peers over a group of two ranks in a store of their own."""
    group, store = _Two(), HashStore()
    monkeypatch.setattr(agreement, "_store", lambda: store)
    monkeypatch.setattr(agreement, "name_in_store", lambda _: "two")
    peers = agreement.Peers.__new__(agreement.Peers)
    peers._group = SimpleNamespace(get=lambda: group)  # type: ignore[assignment]  # a stand-in
    peers._topic, peers._prefix, peers._rank, peers._number = "topic", "", 0, 1
    return peers


def test_a_tally_counts_the_flags_of_all_ranks(two: agreement.Peers) -> None:
    """The counts come with the last rank, and the next tally removes the keys."""
    store = agreement._store()
    # The other rank has set the second flag: fields of two bits.
    store.add(two._key("a") + "/tally", 0b01_00_01)
    assert two.tally("a", [True, False], 0.0) == [1, 1]
    two.say("a/text", "kept until the next tally")
    two.drop_later("a/text")
    assert store.num_keys() == 2

    store.add(two._key("b") + "/tally", 0b01_01)
    assert two.tally("b", [True], 0.0) == [2]
    assert store.num_keys() == 1


def test_a_rank_that_gives_up_is_not_counted(two: agreement.Peers) -> None:
    """So that a rank which comes later does not rely on it."""
    assert two.tally("a", [True, True], 0.05) is None

    assert agreement._store().get(two._key("a") + "/tally") == b"0"


def test_a_rank_that_is_seen_while_this_one_gives_up_is_met(
    two: agreement.Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank comes between the last look and the withdrawal."""
    store, key = agreement._store(), two._key("a") + "/tally"

    class Late:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def add(self, at: str, number: int) -> int:
            if number < 0:
                store.add(key, 1)
            return int(store.add(at, number))

    monkeypatch.setattr(agreement, "_store", Late)

    assert two.tally("a", [True], 0.0) == [1]
