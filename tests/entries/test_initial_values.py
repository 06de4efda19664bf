"""Values are made or sent before sharding: which ones, and from where."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units
from tests.support.sharded import message_of
from tests.support.world import World


def unlike(rank: int, what: str) -> nn.Sequential:
    """A model of which ``what`` differs between ranks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    half = [torch.float16, torch.bfloat16][rank]
    if what == "dtype of equal size":
        model[1].to(half)
    elif what == "dtype of another size":
        model[1].to([torch.float32, half][rank])
    elif what == "dtype of a buffer":
        model[1].register_buffer("table", torch.ones(8, dtype=half))
    elif what == "shape":
        model[1].weight = nn.Parameter(torch.zeros(4 + rank, 4))
    elif rank:
        model[1].register_buffer("table", torch.ones(8))
    return model


@pytest.mark.req("R-05")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_broadcast_of_unlike_tensors_is_refused_before_it_begins(
    world: World, path: str
) -> None:
    """By name on all ranks: equal bytes would be read as another dtype."""
    for what, name in (
        ("dtype of equal size", "bias"),
        ("dtype of another size", "bias"),
        ("dtype of a buffer", "table"),
        ("shape", "weight"),
        ("one more buffer", "table"),
    ):
        model = unlike(world.rank, what)
        text = message_of(
            partial(apply_units, model, (), path=path, sync_module_states=True)
        )

        start = f"DesyncError: sync_module_states=True: '1.{name}': "
        assert text.startswith(start), what
        assert world.all_equal(text)
        assert model[0].weight.shape == (4, 4)


@pytest.mark.req("B-08")
def test_a_module_on_two_paths_is_initialized_once(one_rank: World) -> None:
    """As ``model.apply`` visits it, and so under one seed with the same values."""
    met: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        met.append(module)
        module.to_empty(device=one_rank.device, recurse=False)
        nn.init.ones_(module.get_parameter("weight"))

    with torch.device("meta"):
        layer = nn.Linear(4, 4, bias=False)
        model = nn.Sequential(layer, nn.ReLU(), layer)
    fully_shard(model, param_init_fn=init)

    assert met == [layer]
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 16.0))
