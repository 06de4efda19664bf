"""torch's DistributedDataParallel around modules of which units hold a part, or all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import fully_shard
from tests.support.on_ranks import on_ranks
from tests.support.sharded import message_of
from tests.support.world import World


@pytest.mark.req("P-13")
@on_ranks(2)
def test_ddp_around_units_is_refused(world: World) -> None:
    """Before a weight is overwritten, unless DDP was told to ignore the units."""
    model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    fully_shard(model[1])
    before = [p.detach().clone() for p in model.parameters()]

    text = message_of(lambda: DistributedDataParallel(model))

    assert text == (
        "CompositionError: DistributedDataParallel was put around a Sequential whose "
        "parameter '1.weight' is fully sharded; it would take this rank's rows for the "
        "whole parameter. Units average their gradients themselves: leave "
        "DistributedDataParallel away, and give replicate(model) of this package what "
        "no unit holds."
    )
    model._ddp_params_and_buffers_to_ignore = ["1.weight"]
    DistributedDataParallel(model)
    assert torch.equal(before[1], model[1].weight)
