"""Weights that a forward or a block hands out stay readable memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    PhaseError,
    ShardingStrategy,
    fully_shard,
    reshard,
    unshard,
    unshard_params,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World


class Keeper(nn.Module):
    """A layer that keeps views of its weight on attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.last: Any = None
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer.weight.detach()
        self.cache["row"] = self.layer.weight.data[0]
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("grad", [True, False])
@on_ranks(1, 2)
def test_a_view_of_a_weight_on_an_attribute_is_copied(world: World, grad: bool) -> None:
    """In the first forwards and later, as the output of a forward is."""
    torch.manual_seed(0)
    keeper = Keeper()
    whole = keeper.layer.weight.detach().clone()
    cache = keeper.cache
    model = nn.Sequential(keeper, nn.Linear(8, 3))
    fully_shard(keeper)
    fully_shard(model)
    for _ in range(4):
        with torch.set_grad_enabled(grad):
            out = model(torch.ones(1, 8))

        assert torch.equal(keeper.last, whole)
        assert torch.equal(cache["row"], whole[0])
        if grad:
            backward(out.sum())


@on_ranks(1, 2)
def test_a_reparametrization_of_shards_is_not_removed(world: World) -> None:
    """``remove_weight_norm`` would read beyond this rank's rows."""
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(8, 8))
    model = fully_shard(nn.Sequential(layer, nn.Linear(8, 3)))
    model(torch.ones(1, 8))

    with pytest.raises(PhaseError, match="Remove it before fully_shard"):
        nn.utils.remove_weight_norm(layer)


@pytest.mark.parametrize("offload_to_cpu", [False, True])
@on_ranks(1, 2)
def test_a_parameter_kept_from_a_block_shows_the_shard(
    world: World, offload_to_cpu: bool
) -> None:
    """What ``unshard_params`` hands out is never freed memory."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    whole = model.weight.detach().clone()
    fully_shard(model)
    with unshard_params(model, offload_to_cpu=offload_to_cpu):
        kept, view = model.weight, model.weight.detach()
    with torch.no_grad():
        model(torch.ones(1, 8))
        model.weight.mul_(2)

    assert torch.equal(kept, model.weight)
    assert torch.equal(view, whole)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("end", ["reshard", "forward", "no_grad"])
@on_ranks(1, 2)
def test_a_parameter_kept_from_unshard_shows_the_shard(
    world: World, end: str, strategy: str
) -> None:
    """Also if a forward or a backward reshards; training is that of a plain model."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    whole = plain[0].weight.detach().clone()
    model = copy.deepcopy(plain)
    fully_shard(model[0], strategy=ShardingStrategy[strategy])
    fully_shard(model, strategy=ShardingStrategy[strategy])
    x = torch.ones(1, 8)
    for step in range(3):
        for each in (plain, model):
            if each is model and step < 2:
                unshard(model[0])
                kept, view = model[0].weight, model[0].weight.detach()
                assert view.shape == (8, 8)
            if each is model and end == "reshard":
                reshard(model[0])
            if each is model and end == "no_grad":
                with torch.no_grad():
                    model(x)
            backward(each(x).sum())
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            each.zero_grad()
        assert torch.equal(kept, model[0].weight)
        # Without ranks to gather from, a view is one of the shard.
        if step == 0 and end == "reshard" and world.world_size > 1:
            assert torch.equal(view, whole)

    with unshard_params(model):
        assert torch.equal(model[0].weight, plain[0].weight)
