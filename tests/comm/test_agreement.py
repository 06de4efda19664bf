"""What ranks leave in the key-value store."""

from __future__ import annotations

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
