"""Fused, capturable and foreach optimizers on a GPU, with weights kept full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from composable_fsdp import MixedPrecision, reshard
from composable_fsdp.access import set_reshard_after_backward
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.gpu.counts import NEEDS_NCCL
from tests.optim.models import Mixed, train_plain
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    backward,
    differences,
    loss_of,
    wide_input,
)
from tests.support.sharded import message_of
from tests.support.world import World

pytestmark = NEEDS_NCCL
INPUT = wide_input(8)
WAYS: dict[str, dict[str, Any]] = {
    "one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": False},
    "capturable foreach": {"capturable": True, "foreach": True},
    "capturable fused": {"capturable": True, "fused": True},
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.req("P-02")
@pytest.mark.parametrize("way", WAYS)
@on_ranks()
def test_no_step_on_weights_that_are_kept_full_passes_unnoticed(
    world: World, way: str
) -> None:
    """Refused by the next forward, and as the plain model after ``reshard``."""
    plain = Mixed()
    # Full parameters of another dtype are copies also on one rank.
    wide = MixedPrecision(param_dtype=torch.float64)
    units = ["first", "second"]
    model = apply_units(Mixed().cuda(), units, mixed_precision=wide)
    ours = optim.AdamW(trainable(model), lr=0.05, eps=1e-3, **WAYS[way])
    reference = optim.AdamW(trainable(plain), lr=0.05, eps=1e-3)
    set_reshard_after_backward(model, False)
    for at in range(3):
        x = INPUT(at, world.rank).cuda()
        backward(loss_of(model, x))
        ours.step()
        ours.zero_grad()
        text = message_of(lambda x=x: model(x))  # type: ignore[misc]  # a default
        assert text.startswith("PhaseError: The shards of fully sharded "), (way, text)
        for state in _get_fsdp_states(model):
            reshard(state.module)
    train_plain(plain, reference, world.world_size, range(3))

    found = {name: value.cpu() for name, value in model.state_dict().items()}
    apart = differences(found, dict(plain.state_dict()))
    assert all(value <= 1e-4 for value in apart.values()), (way, apart)
