"""``stream_full``: whole tensors, bucket by bucket."""

from __future__ import annotations

import pytest
import torch

from composable_fsdp.access import stream_full
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.sharded import both_paths, gpt
from tests.support.world import World


@both_paths
@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 30])
@on_ranks(1, 2, 3)
def test_all_tensors_come_once_under_plain_names(
    world: World, path: str, max_bytes: int
) -> None:
    """As the state dict of the plain model, at any size of a bucket."""
    model, plain = gpt(path, tied_head=True), TinyGPT(tied_head=True)

    found = dict(stream_full(model, max_bytes=max_bytes))

    expected = plain.state_dict()
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
