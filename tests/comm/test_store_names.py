"""Names in a store that outlives the processes that use it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from composable_fsdp.comm import agreement
from composable_fsdp.comm.agreement import AgreedName, Peers, key_value_store
from tests.support.on_ranks import on_ranks
from tests.support.world import World


class Ranks:
    """The ranks of an attempt, which take turns in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, size: int) -> None:
        self._patch = patch
        self.names = [AgreedName("0", range(size)) for _ in range(size)]

    def step(self, order: Sequence[int]) -> None:
        """Let the ranks look at the store in this order."""
        for rank in order:
            self._patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            if not self.names[rank].name:
                self.names[rank].step()


@pytest.mark.req("U-07", "R-14")
@pytest.mark.parametrize(
    "before", [[], [1], [2, 1], [0, 1, 2], [1, 2, 0], [1, 2, 0, 1], [1, 0, 1, 2]]
)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_an_attempt_that_was_killed_at_any_time_gives_no_name_to_the_next(
    monkeypatch: pytest.MonkeyPatch, before: list[int], order: list[int]
) -> None:
    """Ranks of the next attempt agree on a new name, and leave no key of their own."""
    store = HashStore()
    monkeypatch.setattr(agreement, "key_value_store", lambda: store)
    killed = Ranks(monkeypatch, 3)
    killed.step(before)
    ranks = Ranks(monkeypatch, 3)
    for _ in range(4):
        ranks.step(order)

    (name,) = {each.name for each in ranks.names}
    assert name.startswith("0@")
    assert name not in {each.name for each in killed.names}
    assert [each.missing() for each in ranks.names] == [[], [], []]
    assert store.num_keys() == 0


@pytest.mark.req("R-14")
def test_a_name_stays_if_another_thread_asks_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that has found the name has removed the keys in which it stood."""
    store = HashStore()
    monkeypatch.setattr(agreement, "key_value_store", lambda: store)
    ranks = Ranks(monkeypatch, 2)
    ranks.step([1, 0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    first = ranks.names[0]

    assert first.step()
    name = first.name
    assert first.step()
    assert first.name == name


@on_ranks(1, 2, 3)
def test_what_ranks_share_is_removed_by_the_last(world: World) -> None:
    """What they said at the place before, the text of one, and the counts; on each rank
    the text arrives before."""
    store = key_value_store()
    for texts in ({}, {world.world_size - 1: "no"}):
        peers = Peers(world.group, "a test")
        peers.say([1])

        told = peers.share(texts.get(world.rank), 10.0, said=True)

        assert told == next(iter(texts.values()), None)
        dist.barrier()
        for each in ("counts", "said", "text"):
            assert not store.check([f"{peers._key}/{each}"]), each
        dist.barrier()
