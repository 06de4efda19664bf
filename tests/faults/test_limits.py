"""Large models, odd parameters, and process groups that are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import FSDPError, fully_shard
from tests.support.on_ranks import on_ranks
from tests.support.world import World, fake_world


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of ``call``."""
    start = time.process_time()
    call()
    return time.process_time() - start


@pytest.mark.req("X-31")
def test_one_unit_of_hundreds_of_modules_trains() -> None:
    """1,200 parameters; a first step that looks at each gradient takes linear time."""

    def train(count: int) -> None:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])
        fully_shard(model)
        model(torch.ones(1, 2)).sum().backward()
        held = [p for p in model.parameters() if p.numel()]
        assert held
        assert all(p.grad is not None for p in held)

    with fake_world(2):
        train(10)
        few = seconds(lambda: train(60))
        many = seconds(lambda: train(600))

    assert many < 30 * few, (few, many)


def transposed(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())


def expanded(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach()[:, :1].expand(8, 8))


def view(module: nn.Linear) -> None:
    """A weight that is a part of a larger tensor."""
    base = torch.zeros(3, 8, 8)
    base[1] = module.weight.detach()
    module.weight = nn.Parameter(base[1])


@pytest.mark.req("X-30")
@on_ranks(2)
@pytest.mark.parametrize("change", [transposed, expanded, view])
def test_parameters_of_any_layout_keep_values_and_gradients(
    world: World, change: Callable[[nn.Linear], None]
) -> None:
    """The sharded model has the plain model's values, and gradients per element."""
    plain, model = nn.Linear(8, 8), nn.Linear(8, 8)
    model.load_state_dict(plain.state_dict())
    change(plain)
    change(model)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    # Elements that share memory would each add to the others, in place.
    plain.weight = nn.Parameter(plain.weight.detach().clone())
    x = torch.ones(2, 8)

    fully_shard(model)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()

    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert plain.weight.grad is not None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = sum((g.square().sum() for g in grads), torch.zeros(()))
    dist.all_reduce(total, group=world.group)
    whole = [p.grad.square().sum() for p in plain.parameters() if p.grad is not None]
    assert torch.allclose(total, torch.stack(whole).sum())


@pytest.mark.req("X-34")
def test_a_rank_outside_of_the_group_is_told_so() -> None:
    """Whoever is not in the group cannot shard over it."""
    with fake_world(2):
        group = dist.new_group([1])
        with pytest.raises(FSDPError, match="Rank 0 is not in the process group"):
            fully_shard(nn.Linear(4, 4), process_group=group)
        wrong: Any = "world"
        with pytest.raises(TypeError, match="process_group expects a torch"):
            fully_shard(nn.Linear(4, 4), process_group=wrong)


@pytest.mark.req("X-34")
@on_ranks(1, 2)
def test_a_model_over_a_new_group_has_the_weights_of_one_whose_group_is_gone(
    world: World,
) -> None:
    """Destroying a group harms no shard, and a new group is a group like any other."""
    group = dist.new_group()
    model = fully_shard(nn.Linear(8, 8), process_group=group)
    expected = model.state_dict()
    dist.destroy_process_group(group)

    again = nn.Linear(8, 8)
    again.load_state_dict(expected)
    fully_shard(again, process_group=dist.new_group())
    again(torch.ones(2, 8)).sum().backward()

    found = again.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # A model on one rank needs no group.
    if world.world_size > 1:
        with pytest.raises(FSDPError, match="process group of the model was destroyed"):
            model.state_dict()
