"""Claims on hooks that users register on the original parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    no_sync,
    set_requires_gradient_sync,
)
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    gpt_units,
    gradients_of,
    loss_of,
    sgd,
    train,
    train_reference,
)
from tests.support.sharded import RankCount, both_paths, gpt, own_gradient, own_parts
from tests.support.world import World

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, eps=1e-3),
}


def torch_hook(parameter: Any, hook: Callable[[Tensor], object]) -> Any:
    """``parameter.register_hook(hook)``, which has no types."""
    return parameter.register_hook(hook)


def step_in_backward(model: nn.Module, name: str) -> None:
    """Have each parameter step as soon as it has its gradient."""

    def attach(parameter: nn.Parameter) -> None:
        optimizer = OPTIMIZERS[name]([parameter])

        def step(leaf: Tensor) -> None:
            optimizer.step()
            leaf.grad = None

        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]

    for parameter in model.parameters():
        attach(parameter)


@pytest.mark.req("B-16")
@both_paths
@on_ranks(1, 2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize(("optimizer", "early"), [("sgd", True), ("adamw", False)])
def test_optimizers_that_step_in_backward_train_as_after_it(
    world: World, path: str, strategy: ShardingStrategy, optimizer: str, early: bool
) -> None:
    """Bit by bit, with hooks registered before and after the model was sharded."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    if early:
        step_in_backward(model, optimizer)
    sharded = apply_units(model, gpt_units(model), path=path, strategy=strategy)
    if not early:
        step_in_backward(sharded, optimizer)

    expected = train_reference(
        plain,
        world.world_size,
        gpt_input,
        lambda ps: OPTIMIZERS[optimizer](list(ps)),
    )
    losses = []
    for at in range(3):
        loss = loss_of(sharded, gpt_input(at, world.rank))
        backward(loss)
        losses.append(loss.item())

    mine = [step[world.rank] for step in expected]
    assert_same_training(sharded, plain, losses, mine)
    assert all(p.grad is None for p in sharded.parameters())


def count_calls(model: nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        counts[name] = 0

        def count(_: Tensor, name: str = name) -> None:
            counts[name] += 1

        parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    return counts


@pytest.mark.req("B-16")
@on_ranks(1, 3)
def test_a_hook_is_called_once_for_each_reduction(world: World) -> None:
    """Not under ``no_sync``, and also where a rank holds no element."""
    model = gpt("composable")
    counts = count_calls(model)

    with no_sync(model):
        backward(loss_of(model, gpt_input(0, world.rank)))
    quiet = set(counts.values())
    backward(loss_of(model, gpt_input(1, world.rank)))
    once = set(counts.values())
    backward(loss_of(model, gpt_input(2, world.rank)))

    assert (quiet, once, set(counts.values())) == ({0}, {1}, {2})


def check_seen(world: World, mixed: MixedPrecision | None) -> None:
    model = gpt("composable", mixed_precision=mixed)
    seen: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():

        def look(gradient: Tensor, name: str = name) -> None:
            seen.setdefault(name, []).append(gradient.clone())

        torch_hook(parameter, look)
    backward(loss_of(model, gpt_input(0, world.rank)))
    first = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    backward(loss_of(model, gpt_input(1, world.rank)))

    for name, parameter in model.named_parameters():
        one, two = seen[name]
        assert one.dtype == parameter.dtype
        if not parameter.numel():
            assert one.shape == two.shape == parameter.shape
            assert parameter.grad is None
            continue
        assert torch.equal(one, first[name])
        assert parameter.grad is not None
        torch.testing.assert_close(first[name] + two, parameter.grad)


@pytest.mark.parametrize("low", [False, True])
def test_tensor_hooks_see_what_each_reduction_adds(ranks: RankCount, low: bool) -> None:
    """In the parameter's dtype, and not what had been accumulated before."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16) if low else None
    ranks(2).run(check_seen, mixed)


@on_ranks(1, 2)
def test_what_tensor_hooks_return_is_the_gradient(world: World) -> None:
    """One after the other, before it is added to what is there."""
    model, plain = gpt("composable"), TinyGPT()
    for parameter in model.parameters():
        torch_hook(parameter, lambda gradient: gradient * 3)
        torch_hook(parameter, lambda gradient: gradient + 1)

    for _ in range(2):
        backward(loss_of(model, gpt_input(0, world.rank)))

    inputs = [gpt_input(0, rank) for rank in range(world.world_size)]
    full = {n: 2 * (3 * g + 1) for n, g in gradients_of(plain, inputs).items()}
    for name, (leaf, part) in own_parts(model, full).items():
        torch.testing.assert_close(own_gradient(leaf), part, msg=name)


@on_ranks(2)
def test_hooks_of_parameters_without_a_gradient_are_not_called(world: World) -> None:
    """As in a plain model."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    counts = count_calls(model)
    fully_shard(model)

    model(torch.ones(1, 2)).sum().backward()
    set_requires_gradient_sync(model, True)

    assert counts == {
        "used.weight": 1,
        "used.bias": 1,
        "unused.weight": 0,
        "unused.bias": 0,
    }


@on_ranks(2)
def test_a_removed_hook_is_not_called(world: World) -> None:
    """And the tensor hook comes before the one after accumulation."""
    model, seen = gpt("composable"), []
    parameter = next(model.parameters())
    handles = [
        torch_hook(parameter, lambda g: seen.append("tensor")),
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append("post")),  # type: ignore[no-untyped-call]
    ]
    train(model, world.rank, gpt_input, sgd, steps=1)
    for handle in handles:
        handle.remove()
    train(model, world.rank, gpt_input, sgd, steps=1)

    assert seen == ["tensor", "post"]
