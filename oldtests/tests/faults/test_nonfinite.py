"""NaN and inf gradients are found by parameter, unit and rank, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import ShardingStrategy, clip_grad_norm_, fully_shard, no_sync
from composable_fsdp.comm.collectives import record
from composable_fsdp.features import NonFinite, find_nonfinite
from tests.support.on_ranks import on_ranks
from tests.support.sharded import message_of
from tests.support.world import World


def sharded(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def backward(model: nn.Module, factor: float) -> None:
    """The gradient of the second bias is ``factor`` times a finite number."""
    hidden: Tensor = model(torch.ones(2, 4))
    loss: Any = hidden.sum() * factor
    loss.backward()


@pytest.mark.req("X-15", "U-11")
@on_ranks(1, 3)
@pytest.mark.parametrize(
    ("strategy", "bad"), [("FULL_SHARD", float("nan")), ("NO_SHARD", float("inf"))]
)
def test_a_bad_gradient_of_one_rank_is_found_on_all(
    world: World, strategy: str, bad: float
) -> None:
    """With its name, its unit, the ranks that hold it and the number of elements."""
    model = sharded(strategy=ShardingStrategy[strategy])
    last = world.world_size - 1
    backward(model, 1.0)
    with record() as calls:
        assert find_nonfinite(model) == ()
    assert [call.numel for call in calls] == [(1,)] * (world.world_size > 1)
    model.zero_grad()
    backward(model, bad if world.rank == last else 1.0)

    found = {each.parameter: each for each in find_nonfinite(model)}

    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    bias = found["1.bias"]
    assert (bias.unit, bias.elements, bias.is_reduced) == ("'1'", 4, True)
    assert bias.kind == ("nan" if bad != bad else "inf")
    assert set(bias.ranks) <= set(range(world.world_size))
    text = message_of(lambda: clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    assert text.startswith("RuntimeError: clip_grad_norm_ expects finite gradients")
    assert "'0.bias' is " in text
    assert " in 4 of its elements (rank" in text
    only = find_nonfinite([model.get_parameter("1.weight")])
    assert [each.parameter for each in only] == ["1.weight"]


@pytest.mark.req("X-15", "U-11")
@on_ranks(3)
def test_before_the_reduction_the_rank_that_computed_it_is_named(world: World) -> None:
    """Inside ``no_sync``, where gradients wait; other ranks' are finite."""
    model = sharded()
    with no_sync(model):
        backward(model, float("nan") if world.rank == 2 else 1.0)

    found = [each for each in find_nonfinite(model) if each.parameter == "1.bias"]

    assert found == [NonFinite("1.bias", "'1'", (2,), "nan", 4, is_reduced=False)]
    assert str(found[0]) == (
        "'1.bias' is nan in 4 of its elements (rank 2, before the reduction)"
    )


@pytest.mark.req("X-15")
@on_ranks(4)
def test_replicas_count_once(world: World) -> None:
    """The ranks of all replicas are named."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    backward(model, float("inf") if world.rank == 3 else 1.0)

    (found,) = [each for each in find_nonfinite(model) if each.parameter == "1.bias"]

    assert found.elements == 4
    assert {rank % 2 for rank in found.ranks} in ({0}, {1}, {0, 1})
    assert {rank // 2 for rank in found.ranks} == {0, 1}


def test_plain_parameters_go_by_position() -> None:
    """A model without units communicates nothing."""
    model = nn.Linear(2, 2)
    model.bias.grad = torch.tensor([float("nan"), float("inf")])
    model.weight.grad = torch.ones(2, 2)

    assert find_nonfinite(model) == (
        NonFinite("parameter 1", "", (0,), "nan and inf", 2, is_reduced=True),
    )
    with pytest.raises(TypeError, match="find_nonfinite expects a module or param"):
        find_nonfinite(3)  # type: ignore[arg-type]  # the wrong argument
