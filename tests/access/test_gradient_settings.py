"""Claims on when gradients are reduced, and by what they are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fsdp2
from torch.distributed.tensor import DTensor

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_reduce_scatter_unused_params,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from composable_fsdp.comm.call_records import CallRecord
from composable_fsdp.comm.collectives import record
from composable_fsdp.flat.reduce_rule import split_factor
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.access.test_no_sync import assert_gradients, summed_then_averaged
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import gpt_input, loss_of, tolerance_at
from tests.support.sharded import (
    both_paths,
    gpt,
    message_of,
    own_gradient,
    own_parts,
)
from tests.support.world import World


def backward(model: nn.Module, batch: int, rank: int) -> None:
    loss_of(model, gpt_input(batch, rank)).backward()  # type: ignore[no-untyped-call]


def sent(calls: Sequence[CallRecord], op: str) -> int:
    return sum(call.op == op for call in calls)


@pytest.mark.req("B-14")
@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("who", ["all", "blocks", "root"])
def test_units_that_do_not_sync_accumulate_without_communication(
    world: World, path: str, who: str
) -> None:
    """Of all units, some or the root alone: the sum is that of the plain model."""
    model = gpt(path)
    target = model.get_submodule("blocks") if who == "blocks" else model

    set_requires_gradient_sync(target, False, recurse=who != "root")
    with record() as quiet:
        backward(model, 0, world.rank)
        backward(model, 1, world.rank)
    set_requires_gradient_sync(model, True)
    with record() as calls:
        backward(model, 2, world.rank)

    waiting = {"all": 3, "blocks": 2, "root": 1}[who]
    alone = world.world_size == 1
    assert sent(quiet, "reduce_scatter") == (0 if alone else 2 * (3 - waiting))
    assert sent(calls, "reduce_scatter") == (0 if alone else 3)
    tolerance = 0.0 if who == "all" else 1e-6
    expected = summed_then_averaged(world, [0, 1, 2])
    assert_gradients(model, expected, tolerance_at(world.world_size) or tolerance)


def hybrid(world: World, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return gpt(
        "composable",
        strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        **options,
    )


@pytest.mark.req("B-14")
@on_ranks(4)
def test_hybrid_units_all_reduce_at_the_last_micro_batch_only(world: World) -> None:
    """Each micro-batch reduce-scatters; the replicas' sums are taken once, at last."""
    model = hybrid(world)

    set_requires_all_reduce(model, False)
    with record() as partial_calls:
        backward(model, 0, world.rank)
        backward(model, 1, world.rank)
    between = [p.grad for p in model.parameters()]
    held = [
        r.reduce.partial
        for s in _get_fsdp_states(model)
        for r in s.handle.layout.trainable
    ]
    set_requires_all_reduce(model, True)
    with record() as calls:
        backward(model, 2, world.rank)

    regions = len(held)
    assert between == [None] * len(between)
    assert all(part is not None for part in held)
    assert sent(partial_calls, "reduce_scatter") == 6
    assert sent(partial_calls, "all_reduce") == 0
    assert (sent(calls, "reduce_scatter"), sent(calls, "all_reduce")) == (3, regions)
    assert_gradients(model, summed_then_averaged(world, [0, 1, 2]), 1e-6)
    backward(model, 3, world.rank)
    assert_gradients(model, summed_then_averaged(world, [0, 1, 2, 3]), 1e-6)


@on_ranks(4)
def test_sums_that_wait_are_shards_in_the_reduce_dtype(world: World) -> None:
    """Also when compute is in bfloat16."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = hybrid(world, mixed_precision=precision)

    set_requires_all_reduce(model, False)
    backward(model, 0, world.rank)

    for state in _get_fsdp_states(model):
        for region in state.handle.layout.trainable:
            assert region.reduce.partial is not None
            assert region.reduce.partial.dtype == torch.float32
            assert region.reduce.partial.shape == (region.layout.shard_numel,)


class Half(nn.Module):
    """Two layers of which one runs when asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        y: torch.Tensor = self.a(x)
        return self.b(y) if both else y


@on_ranks(2)
def test_a_unit_unused_in_the_last_micro_batch_gets_its_waiting_sums(
    world: World,
) -> None:
    """The end of backward reduces what waited, though the unit did not run."""
    model, plain = Half(), Half()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for module in (model.b, model):
        fully_shard(module, strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    x = torch.ones(2, 4)

    set_requires_all_reduce(model, False)
    model(x, both=True).sum().backward()
    set_requires_all_reduce(model, True)
    model(x, both=False).sum().backward()
    plain(x, both=True).sum().backward()
    plain(x, both=False).sum().backward()

    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def whole(gradient: torch.Tensor | None) -> torch.Tensor:
    """The full gradient of a DTensor; of a plain model divided by the factor."""
    assert gradient is not None
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    return gradient / 8.0


@pytest.mark.req("B-15")
@on_ranks(1, 2)
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]
)
def test_a_divide_factor_replaces_the_number_of_ranks_as_in_fsdp2(
    world: World, strategy: ShardingStrategy
) -> None:
    """Gradients are the sum over ranks divided by the factor."""
    model, theirs = gpt("composable", strategy=strategy), TinyGPT()
    if world.world_size > 1:  # of one rank, torch 2.13 divides twice
        reference: Any = torch_fsdp2(theirs)
        reference.set_gradient_divide_factor(8.0)
        # Its own scaling sum is one of NCCL's.
        reference.set_force_sum_reduction_for_comms(True)

    for state in _get_fsdp_states(model):
        set_gradient_divide_factor(state.module, 8.0)
    backward(model, 0, world.rank)
    backward(theirs, 0, world.rank)

    full = {n: whole(p.grad) for n, p in theirs.named_parameters()}
    for name, (leaf, part) in own_parts(model, full).items():
        torch.testing.assert_close(own_gradient(leaf), part, msg=name)


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]
)
@on_ranks(2)
def test_a_float16_sum_beyond_its_range_has_the_right_average(
    world: World, strategy: ShardingStrategy
) -> None:
    """Two times 40000 do not fit, their average does."""
    model = nn.Linear(1, 2, bias=False)
    mixed = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float16)
    fully_shard(model, mixed_precision=mixed, strategy=strategy)

    model(torch.full((1, 1), 40000.0)).sum().backward()

    gradient = own_gradient(model.weight)
    assert torch.equal(gradient, torch.full_like(gradient, 40000.0))


@pytest.mark.parametrize("factor", [1, 2, 3, 5, 6, 7, 8, 48, 1000, 1024, 2.5])
def test_the_two_divisions_give_the_factor(factor: float) -> None:
    """The first is a power of two, and neither is much larger than the root."""
    before, after = split_factor(factor)

    assert before * after == factor
    assert before.hex().startswith("0x1.0000000000000p")
    assert before <= 2 * max(factor**0.5, 1)


@on_ranks(1, 2)
def test_the_last_reduction_is_awaited_by_the_last_backward(world: World) -> None:
    """Before, the end of backward leaves it on its way, and no sum is lost."""
    model = gpt("composable")

    set_is_last_backward(model, False)
    backward(model, 0, world.rank)
    in_flight = _get_fsdp_states(model)[0].context
    assert in_flight is not None
    pending = in_flight.reducing is not None
    set_is_last_backward(model, True)
    backward(model, 1, world.rank)

    assert pending == (world.world_size > 1)
    assert in_flight.reducing is None
    expected = summed_then_averaged(world, [0, 1])
    assert_gradients(model, expected, tolerance_at(world.world_size) or 1e-6)


@pytest.mark.req("B-14")
@on_ranks(2)
def test_low_precision_compute_accumulates_in_the_reduce_dtype(world: World) -> None:
    """What waits between micro-batches is float32 under bfloat16 compute."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = gpt("composable", mixed_precision=mixed)

    set_requires_gradient_sync(model, False)
    backward(model, 0, world.rank)
    backward(model, 1, world.rank)

    for state in _get_fsdp_states(model):
        for region in state.handle.layout.trainable:
            assert region.reduce.buffer is not None
            assert region.reduce.buffer.dtype == torch.float32
            assert region.reduce.buffer.untyped_storage().nbytes() > 0
    set_requires_gradient_sync(model, True)
    backward(model, 2, world.rank)
    clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize(
    "act",
    [
        partial(set_requires_gradient_sync, requires_gradient_sync=False),
        partial(set_requires_all_reduce, requires_all_reduce=False),
        partial(set_is_last_backward, is_last_backward=False),
    ],
)
def test_a_model_without_units_is_refused(act: partial[None]) -> None:
    """The message names the function and says where to call it."""
    text = message_of(lambda: act(nn.Linear(2, 2)))

    assert text == (
        f"CompositionError: {act.func.__name__} was called on a Linear that holds no "
        "fully sharded module; nor is it in one. Apply fully_shard first."
    )


def test_a_divide_factor_that_is_not_positive_is_refused() -> None:
    """Before anything is looked for."""
    text = message_of(lambda: set_gradient_divide_factor(nn.Linear(2, 2), 0.0))

    assert text.startswith("ValueError: set_gradient_divide_factor expects a positive")


@pytest.mark.parametrize(
    "switch",
    [
        set_is_last_backward,
        set_reduce_scatter_unused_params,
        set_requires_all_reduce,
        set_requires_gradient_sync,
        set_reshard_after_backward,
        set_reshard_after_forward,
    ],
)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_takes_nothing_but_true_and_false(
    one_rank: World, switch: Callable[..., None], value: object
) -> None:
    """A text would count as true; nothing is set."""
    model = fully_shard(nn.Linear(2, 2))

    text = message_of(lambda: switch(model, value))

    assert text == (
        f"TypeError: {switch.__name__} expects True or False, got {value!r}. Compare, "
        "if it is a number or a text: (step + 1) % 4 == 0."
    )
