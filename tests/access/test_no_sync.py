"""Claims on accumulating gradients without communication."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, no_sync
from composable_fsdp.comm.call_records import CallRecord
from composable_fsdp.comm.collectives import record
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import STRATEGIES, gpt_input, loss_of, tolerance_at
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
    own_gradient,
    own_parts,
)
from tests.support.world import World


def backward(model: nn.Module, batch: int, rank: int) -> None:
    loss_of(model, gpt_input(batch, rank)).backward()  # type: ignore[no-untyped-call]


def reductions(calls: Sequence[CallRecord]) -> int:
    return sum(call.op in ("reduce_scatter", "all_reduce") for call in calls)


def summed_then_averaged(world: World, batches: Sequence[int]) -> dict[str, Tensor]:
    """Each rank's gradients on the plain model, summed over batches, then averaged."""
    total: dict[str, Tensor] = {}
    for rank in range(world.world_size):
        plain = TinyGPT()
        for batch in batches:
            backward(plain, batch, rank)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            grad = parameter.grad
            total[name] = total[name] + grad if name in total else grad
    return {name: value / world.world_size for name, value in total.items()}


def assert_gradients(
    model: nn.Module, expected: dict[str, Tensor], tolerance: float
) -> None:
    for name, (leaf, part) in own_parts(model, expected).items():
        gradient = own_gradient(leaf)
        if tolerance:
            assert torch.allclose(gradient, part, atol=tolerance), name
        else:
            assert torch.equal(gradient, part), name


@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_micro_batches_inside_cost_no_reduction_and_are_summed_in_one(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """Two batches inside and one after equal one reduction of the sum."""
    model = gpt(path, strategy=strategy)

    with record() as quiet, no_sync(model):
        backward(model, 0, world.rank)
        backward(model, 1, world.rank)
    unreduced = [parameter.grad for parameter in model.parameters()]
    with record() as calls:
        backward(model, 2, world.rank)

    assert reductions(quiet) == 0
    assert unreduced == [None] * len(unreduced)
    per_region = strategy is ShardingStrategy.NO_SHARD
    units = sum(
        len(s.handle.layout.trainable) if per_region else 1
        for s in _get_fsdp_states(model)
    )
    assert reductions(calls) == (units if world.world_size > 1 else 0)
    assert_gradients(
        model, summed_then_averaged(world, [0, 1, 2]), tolerance_at(world.world_size)
    )


@on_ranks(1, 2, 3)
@both_paths
def test_leaving_an_inner_block_does_not_end_the_outer_one(
    world: World, path: str
) -> None:
    """Each block restores what it found."""
    model = gpt(path)
    block = model.get_submodule("blocks")[0]  # type: ignore[index]

    with record() as calls, no_sync(model):
        with no_sync(block):
            backward(model, 0, world.rank)
        backward(model, 1, world.rank)
    backward(model, 2, world.rank)

    assert reductions(calls) == 0
    assert_gradients(
        model, summed_then_averaged(world, [0, 1, 2]), tolerance_at(world.world_size)
    )


@on_ranks(2, 3)
@both_paths
def test_on_a_unit_only_that_unit_waits(world: World, path: str) -> None:
    """The other units reduce as ever, and the end is the same sum."""
    model = gpt(path)
    block = model.get_submodule("blocks")[1]  # type: ignore[index]

    with record() as calls, no_sync(block):
        backward(model, 0, world.rank)
    quiet = [p.grad is None for p in block.parameters()]
    others = [
        p.grad is None for p in model.get_submodule("norm").parameters() if p.numel()
    ]
    with record() as after:
        backward(model, 1, world.rank)

    assert (reductions(calls), reductions(after)) == (2, 3)
    assert all(quiet)
    assert not any(others)
    assert_gradients(
        model,
        summed_then_averaged(world, [0, 1]),
        tolerance_at(world.world_size) or 1e-6,
    )


@on_ranks(1, 2, 3)
@both_paths
def test_after_a_raise_inside_the_next_backward_reduces(
    world: World, path: str
) -> None:
    """What had arrived before the raise is part of the sum."""
    model = gpt(path)

    def act() -> None:
        with no_sync(model):
            backward(model, 0, world.rank)
            raise KeyError("in the block")

    assert message_of(act).startswith("KeyError")
    with record() as calls:
        backward(model, 1, world.rank)

    assert reductions(calls) == (3 if world.world_size > 1 else 0)
    assert_gradients(
        model, summed_then_averaged(world, [0, 1]), tolerance_at(world.world_size)
    )


@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_saving_and_evaluating_between_micro_batches_loses_no_gradient(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """Gradients that wait survive a state dict and a forward without backward."""
    model = gpt(path, strategy=strategy)

    with no_sync(model):
        backward(model, 0, world.rank)
        model.state_dict()
        with torch.no_grad():
            loss_of(model, gpt_input(9, world.rank))
    model.load_state_dict(model.state_dict())
    backward(model, 1, world.rank)

    assert_gradients(
        model, summed_then_averaged(world, [0, 1]), tolerance_at(world.world_size)
    )


def check_gathers(world: World, path: str, strategy: ShardingStrategy) -> list[int]:
    model = gpt(path, strategy=strategy)
    gathers = []
    with no_sync(model):
        for batch in range(2):
            with record() as calls:
                backward(model, batch, world.rank)
            gathers.append(sum(call.op == "all_gather" for call in calls))
    for batch in range(2, 4):
        with record() as calls:
            backward(model, batch, world.rank)
        gathers.append(sum(call.op == "all_gather" for call in calls))
    assert_gradients(model, summed_then_averaged(world, [0, 1, 2, 3]), 1e-6)
    return gathers


@pytest.mark.req("B-14")
@both_paths
def test_what_stays_full_for_backward_stays_for_the_next_forward(
    ranks: RankCount, path: str
) -> None:
    """With SHARD_GRAD_OP three gathers serve three batches; FULL_SHARD gathers anew."""
    kept = ranks(2).run(check_gathers, path, ShardingStrategy.SHARD_GRAD_OP)[0]
    freed = ranks(2).run(check_gathers, path, ShardingStrategy.FULL_SHARD)[0]

    assert kept == [3, 0, 0, 3]
    assert freed == [5, 5, 5, 5]


def test_a_model_without_units_is_refused() -> None:
    """The message says where to call it."""
    text = message_of(no_sync(nn.Linear(2, 2)).__enter__)

    assert text == (
        "CompositionError: no_sync was called on a Linear that holds no fully sharded "
        "module; nor is it in one. Apply fully_shard first."
    )
