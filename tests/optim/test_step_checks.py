"""Optimizers that need whole parameters, and state that is not of the shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from composable_fsdp import (
    ShardingStrategy,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    replicate,
)
from tests.optim.models import Mixed, by_name, mixed, train_plain, train_sharded
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import PATHS, apply_units, averaged_gradients
from tests.support.sharded import RankCount, both_paths, message_of
from tests.support.world import World

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
WHOLE: dict[str, Make] = {
    "Muon": lambda ps: optim.Muon([p for p in ps if p.ndim == 2], lr=0.1),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.1),
    "LBFGS": lambda ps: optim.LBFGS(ps, lr=0.1),
    "SparseAdam": lambda ps: optim.SparseAdam(ps, lr=0.1),
}
needs_whole = pytest.mark.parametrize("name", WHOLE)


class Lamb(optim.SGD):
    """Somebody else's optimizer, of a name that is known."""


class ForShards(Lamb):
    """One that its author made for shards."""

    works_on_shards = True


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def check_refused(world: World, name: str) -> list[str]:
    texts = []
    for path in PATHS:
        model = mixed(path)
        optimizer = WHOLE[name](trainable(model))
        model(torch.ones(2, 8)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        closure = (lambda: 0.0) if name == "LBFGS" else None
        empty: dict[str, Any] = {"state": {}, "param_groups": []}
        texts += [
            message_of(partial(optimizer.step, closure)),
            message_of(partial(optim_state_dict, model, optimizer)),
            message_of(partial(optim_state_dict_to_load, model, optimizer, empty)),
        ]
        assert _same([p.detach() for p in model.parameters()], before)
    return texts


@pytest.mark.req("U-04")
@needs_whole
def test_an_optimizer_that_needs_whole_parameters_is_refused_at_its_first_step(
    ranks: RankCount, name: str
) -> None:
    """And where its state is asked for: reason, parameter, way out; nothing changed."""
    for texts in ranks(2).run(check_refused, name):
        for text in texts:
            assert text.startswith(f"CompositionError: {name} ")
            assert "and of 'first.weight' each rank holds a part" in text.replace(
                "'scale'", "'first.weight'"
            )
            assert "Use an element-wise optimizer" in text
            assert "replicate(module), strategy=ShardingStrategy.NO_SHARD" in text


def whole(way: str) -> nn.Module:
    if way == "replicate":
        model = Mixed()
        replicate(model)
        return model
    return apply_units(
        Mixed(), ["first"], path="wrapper", strategy=ShardingStrategy.NO_SHARD
    )


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


@pytest.mark.req("U-04")
@pytest.mark.parametrize("way", ["replicate", "NO_SHARD"])
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LBFGS"])
@on_ranks(2)
def test_whole_parameters_are_trained_by_any_optimizer(
    world: World, name: str, way: str
) -> None:
    """As on the plain model, and its state goes out and in as it is."""
    model, plain = whole(way), Mixed()
    ours, reference = (WHOLE[name](trainable(m)) for m in (model, plain))
    closure: Any = None
    for at in range(2):
        torch.autograd.backward(model(torch.ones(2, 8) * at).square().mean())
        averaged_gradients(plain, [torch.ones(2, 8) * at], square)
        if name == "LBFGS":
            closure = lambda: 1.0  # noqa: E731  # gradients stay as they are
        ours.step(closure)
        reference.step(closure)
        ours.zero_grad()
    state = optim_state_dict(model, ours)
    part = optim_state_dict_to_load(model, ours, by_name(plain, reference))

    assert _same(state["state"], by_name(plain, reference)["state"])
    assert _same(part["state"], reference.state_dict()["state"])


@on_ranks(2)
def test_known_optimizers_of_others_are_refused_unless_made_for_shards(
    world: World,
) -> None:
    """By the name of the class; ``works_on_shards`` says otherwise."""
    model = fully_shard(tiny_mlp())
    model(torch.ones(1, 8)).sum().backward()

    text = message_of(Lamb(model.parameters(), lr=0.1).step)
    ForShards(model.parameters(), lr=0.1).step()

    assert "Lamb scales by norms of whole parameters" in text


class RowMeans(optim.Optimizer):
    """Keeps a mean per row, and says so nowhere."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.ndim > 1 and p.grad is not None:
                self.state[p]["row_means"] = p.grad.mean(1)


def check_row_means(world: World) -> list[str]:
    model = fully_shard(tiny_mlp())
    optimizer = RowMeans(model.parameters(), {})
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return [
        message_of(lambda: optimizer.step()),
        message_of(lambda: optim_state_dict(model, optimizer)),
    ]


@pytest.mark.req("U-04")
def test_state_that_is_not_element_wise_is_noticed_by_its_shape(
    ranks: RankCount,
) -> None:
    """At the step after the one that made it, and by ``optim_state_dict``."""
    for at_step, at_save in ranks(2).run(check_row_means):
        assert "RowMeans's state 'row_means' of '0.weight' has shape (" in at_step
        assert "expected a scalar or this rank's shard, (" in at_step
        assert "use an element-wise optimizer" in at_save


@pytest.mark.req("S3-11")
@both_paths
@on_ranks(2)
def test_an_optimizer_made_before_sharding_stays_valid(world: World, path: str) -> None:
    """It trains the same parameter objects, as on the plain model bit by bit.

    An optimizer from before goes on, if it has no state; here by both ways.
    """
    make = partial(optim.AdamW, lr=0.05)
    plain = Mixed()
    reference = make(trainable(plain))
    model: nn.Module = Mixed()
    ours = make(trainable(model))
    model = apply_units(model, ["first"], path=path)
    train_sharded(model, ours, world, range(3))
    train_plain(plain, reference, world.world_size, range(3))

    assert _same(optim_state_dict(model, ours), by_name(plain, reference))
    assert _same(dict(model.state_dict()), dict(plain.state_dict()))


def check_full_state(world: World, path: str, kind: str) -> str:
    model, plain = Mixed(), Mixed()
    make: Any = {"stepped": optim.AdamW, "at once": optim.Adagrad}[kind]
    ours, reference = make(trainable(model)), make(trainable(plain))
    if kind == "stepped":
        train_plain(model, ours, world.world_size, range(2))
        train_plain(plain, reference, world.world_size, range(2))
    saved = optim_state_dict(model, ours)
    sharded = apply_units(model, ["first"], path=path)
    text = message_of(lambda: train_sharded(sharded, ours, world, range(2, 3)))
    for p in sharded.parameters():
        p.grad = None

    # The way out that the message names.
    optim_state_dict_to_load(sharded, ours, saved, load_directly=True)
    train_sharded(sharded, ours, world, range(2, 4))
    train_plain(plain, reference, world.world_size, range(2, 4))

    assert _same(optim_state_dict(sharded, ours), by_name(plain, reference))
    assert _same(dict(sharded.state_dict()), dict(plain.state_dict()))
    return text


@pytest.mark.req("S3-11")
@pytest.mark.parametrize("kind", ["stepped", "at once"])
@both_paths
def test_full_state_from_before_sharding_is_refused_with_a_way_out_that_works(
    ranks: RankCount, path: str, kind: str
) -> None:
    """Adagrad makes its state when it is made; Adam at its first step."""
    for text in ranks(2).run(check_full_state, path, kind):
        assert text.startswith("CompositionError: ")
        assert "has the full shape (" in text
        assert "expected this rank's shard, (" in text
        assert "state = optim_state_dict(model, optim) while the model is" in text


@on_ranks(2, 3)
@pytest.mark.parametrize("shapes", [[(2, 2)], [(2, 2), (1,)], [(3, 2), (4, 1)]])
def test_ranks_that_hold_parameters_whole_refuse_state_with_the_others(
    world: World, shapes: list[tuple[int, ...]]
) -> None:
    """They cannot see by shapes that the state is that of a plain model."""
    model = nn.Module()
    for index, shape in enumerate(shapes):
        model.register_parameter(f"p{index}", nn.Parameter(torch.ones(shape)))
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    fully_shard(model)

    text = message_of(optimizer.step)

    assert text.startswith("CompositionError: ")
    assert "Adagrad's state 'sum' of 'p" in text
    assert "It was made before fully_shard, or loaded from a plain model." in text


@on_ranks(2)
@pytest.mark.parametrize("rows", [8, 7, 1])
def test_state_that_a_constructor_made_is_right_or_refused_if_rank_0_wrote_it(
    world: World, rows: int
) -> None:
    """No hook of torch shows Adagrad's state dict to the package before a step.

    The state is plain until then: this rank's part, filled with one number. Every
    rank may have rank 0's, where the parts have equal shapes.
    """
    torch.manual_seed(0)
    plain = nn.Linear(8, rows, bias=False)
    model = fully_shard(copy.deepcopy(plain))
    make = partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
    ours, reference = make(model.parameters()), make(plain.parameters())
    raw = ours.state_dict()["state"]
    assert type(raw[0]["sum"]) is torch.Tensor
    assert raw[0]["sum"].shape == model.weight.shape

    file = [ours.state_dict()]
    dist.broadcast_object_list(file, src=0)
    ours.load_state_dict(file[0])
    inputs = [torch.rand(2, 8) for _ in range(world.world_size)]
    averaged_gradients(plain, inputs, lambda each, x: each(x).square().sum())
    reference.step()
    model(inputs[world.rank]).square().sum().backward()

    if rows == 8:
        ours.step()
        assert _same(dict(model.state_dict()), dict(plain.state_dict()))
        assert _same(optim_state_dict(model, ours), by_name(plain, reference))
    else:
        text = message_of(ours.step)
        assert text.startswith("CompositionError: ")
        assert "Adagrad's state 'sum' of 'weight'" in text
