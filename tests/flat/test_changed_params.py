"""Parameters that a user casts after others of their region were frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.errors import PlanError
from tests.support.on_ranks import on_ranks
from tests.support.world import World


@pytest.mark.req("B-07")
@on_ranks(2)
def test_a_cast_of_frozen_parameters_alone_is_refused_by_name(world: World) -> None:
    """Frozen and trainable ones share a region again when they are unfrozen."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0].requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    model[0].bfloat16()

    with pytest.raises(PlanError, match=r"'1\.weight'.*float32.*one dtype"):
        model(torch.ones(1, 4, dtype=torch.bfloat16))
    model[1].bfloat16()
    model[0].requires_grad_(True)
    out = model(torch.ones(1, 4, dtype=torch.bfloat16))

    out.sum().backward()
    held = [p for p in model.parameters() if p.numel()]
    assert {p.grad_dtype for p in held} == {p.dtype for p in held} == {torch.bfloat16}
    assert all(p.grad is not None for p in held)
