"""CPU offload: shards live on the host, and the host never reads half a gradient.

The compute device is the CPU here too, so copies are trivial; what a slow device would
do is played by copies that wait for `synchronize`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.comm.device import Streams
from composable_fsdp.runtime import offload
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.offloading import (
    OFFLOAD,
    accumulate,
    offloaded_gpt,
    three_points,
    train_offloaded,
)
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    backward,
    differences,
    gpt_input,
    gradients_of,
    loss_of,
    tolerance_at,
    train,
    wide_input,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


@pytest.mark.req("S2-08")
@pytest.mark.parametrize("path", PATHS)
@all_strategies
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_offloaded_gpt_trains_as_the_plain_one(
    ranks: RankCount, world_size: int, strategy: ShardingStrategy, path: str
) -> None:
    """Losses and weights are equal, bitwise at one and two ranks; NO_SHARD included."""
    ranks(world_size).run(train_offloaded, path, strategy, tolerance_at(world_size))


@pytest.mark.req("S2-08")
@all_strategies
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_on_the_host_after_init_forward_and_backward(
    ranks: RankCount, world_size: int, strategy: ShardingStrategy
) -> None:
    """At the three points, and full parameters have given their memory back."""
    ranks(world_size).run(three_points, strategy)


@pytest.mark.req("S2-08")
@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_offloaded_gradients_is_that_of_the_plain_model(
    ranks: RankCount, world_size: int
) -> None:
    """The norm is taken of gradients on the host."""
    strategy = ShardingStrategy.FULL_SHARD
    ranks(world_size).run(train_offloaded, "composable", strategy, 1e-5, 0.05)


@pytest.mark.req("B-14")
@pytest.mark.parametrize("how", ["every time", "no_sync"])
@all_strategies
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_gradients_accumulate(
    ranks: RankCount, world_size: int, strategy: ShardingStrategy, how: str
) -> None:
    """With and without communication, the sum of all microbatches is on the host."""
    ranks(world_size).run(accumulate, strategy, how)


@all_strategies
@on_ranks(2)
def test_offload_sends_what_is_sent_without_it(
    world: World, strategy: ShardingStrategy
) -> None:
    """Same collectives, same sizes, same order.

    The collectives of a step, with and without offload.
    """
    logs = []
    for option in (None, OFFLOAD):
        model, _ = offloaded_gpt(world, strategy=strategy, cpu_offload=option)
        with record() as calls:
            train(model, world.rank, gpt_input, adamw, steps=2)
        logs.append(calls)

    assert logs[0] == logs[1]


PRECISIONS = [
    MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True),
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=["reduce wide", "keep narrow"])
@on_ranks(1, 2)
def test_offloaded_mixed_precision_accumulates_as_without_offload(
    world: World, precision: MixedPrecision
) -> None:
    """The sum on the device rounds as the sum in the gradients' own dtype does.

    Gradients of two microbatches, with offload and without it, bit by bit.
    """
    found = []
    for option in (None, OFFLOAD):
        model, _ = offloaded_gpt(world, cpu_offload=option, mixed_precision=precision)
        for step in range(2):
            backward(loss_of(model, gpt_input(step, world.rank)))
        found.append([p.grad for p in model.parameters() if p.numel()])

    for plain, offloaded in zip(*found, strict=True):
        assert plain is not None
        assert offloaded is not None
        assert plain.dtype == offloaded.dtype
        assert torch.equal(plain, offloaded)


@on_ranks(2)
def test_a_policy_offloads_single_units(world: World) -> None:
    """The option is per unit; the others stay as they are.

    By policy, one block of two.
    """
    model = TinyGPT()
    plain = copy.deepcopy(model)
    policy = CustomPolicy(
        lambda m: {"cpu_offload": OFFLOAD} if m is model.blocks[1] else False
    )
    fully_shard(model, policy=policy)
    reference = apply_units(plain, ["blocks.1"])
    handles = _get_fsdp_handles(model)

    losses = train(model, world.rank, gpt_input, adamw)

    assert [handle.layout.offload for handle in handles] == [False, True]
    assert losses == train(reference, world.rank, gpt_input, adamw)


# ---- outside the step -------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@all_strategies
@on_ranks(1, 2)
def test_offloaded_parameters_can_be_read_and_written_in_full(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """What a block writes reaches the shards on the host, unless told not to.

    Full parameters outside the step, read and written, by each rank or by one.
    """
    model, plain = offloaded_gpt(world, path, strategy=strategy)
    with unshard_params(model):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            ours.data.add_(1.0)
    added = {name: value.clone() for name, value in model.state_dict().items()}
    with unshard_params(model, rank0_only=True):
        if world.rank == 0:
            for parameter in model.parameters():
                parameter.data.add_(1.0)
    with unshard_params(model, writeback=False):
        for parameter in model.parameters():
            parameter.data.zero_()

    for name, value in model.state_dict().items():
        assert torch.equal(added[name], plain.state_dict()[name] + 1)
        assert torch.equal(value, added[name] + 1)


def train_one(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> list[float]:
    """Two more steps; their losses."""
    losses = []
    for step in (7, 8):
        loss = loss_of(model, gpt_input(step, rank))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.req("S3-05")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(1, 2)
def test_offloaded_state_dicts_go_round(world: World, path: str) -> None:
    """Model and optimizer state load into a fresh model, which trains on equally.

    A state dict right after construction and after steps, and the optimizer's.
    """
    model, plain = offloaded_gpt(world, path)
    model.load_state_dict(model.state_dict())
    assert differences(model.state_dict(), plain.state_dict()) == {}
    optimizer = adamw(model.parameters())
    for step in range(2):
        backward(loss_of(model, gpt_input(step, world.rank)))
        optimizer.step()
        optimizer.zero_grad()
    weights, state = model.state_dict(), optim_state_dict(model, optimizer)

    other, _ = offloaded_gpt(world, path)
    other.load_state_dict(weights)
    fresh = adamw(other.parameters())
    optim_state_dict_to_load(other, fresh, state, load_directly=True)

    held = [value for values in fresh.state.values() for value in values.values()]
    assert all(value.device.type == "cpu" for value in held)
    mine = train_one(model, optimizer, world.rank)
    assert train_one(other, fresh, world.rank) == mine
    assert differences(other.state_dict(), model.state_dict()) == {}


# ---- copies that take their time --------------------------------------------


@contextmanager
def slow_copies(model: nn.Module) -> Iterator[list[Callable[[], object]]]:
    """Copies to the host wait for ``synchronize``; the target is NaN until then.

    A copy to the device comes after those that were issued before it, as on a stream.
    """
    waiting: list[Callable[[], object]] = []

    def synchronize(_: object = None) -> None:
        while waiting:
            waiting.pop(0)()

    def issue(target: Tensor, source: Tensor) -> None:
        regions = [
            r for handle in _get_fsdp_handles(model) for r in handle.layout.trainable
        ]
        if any(target is region.gradient.shard for region in regions):
            waiting.append(lambda: target.copy_(source))
            target.fill_(float("nan"))
        else:
            synchronize()
            target.copy_(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "copy_async", issue)
        patch.setattr(Streams, "synchronize", synchronize)
        yield waiting


def units_of(strategy: ShardingStrategy) -> tuple[nn.Sequential, nn.Sequential]:
    """Three linears, each an offloaded unit, and their plain copy."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    plain = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, cpu_offload=OFFLOAD, strategy=strategy)
    fully_shard(model, cpu_offload=OFFLOAD, strategy=strategy)
    return model, plain


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def watch_a_backward(world: World, strategy: ShardingStrategy) -> None:
    """What the host sees of gradients during backward, twice, the second adding."""
    model, plain = units_of(strategy)
    x = wide_input(6)(0, 0)
    expected = gradients_of(plain, [x])
    seen: list[list[str]] = []
    at_the_end = []

    def look(_: Tensor) -> None:
        grads = gradients(model)
        seen.append([name for name, grad in grads.items() if grad is not None])
        at_the_end.append(len(waiting))

    with slow_copies(model) as waiting:
        for times in (1, 2):
            loss = loss_of(model, x.requires_grad_())
            x.register_hook(look)  # type: ignore[no-untyped-call]  # torch has no types there
            backward(loss)

            assert not waiting
            for name, grad in gradients(model).items():
                assert grad is not None
                torch.testing.assert_close(grad, times * whole(model, name, expected))
    # By then all three units have sent theirs; in the second backward the copies of
    # the first microbatch are what is added to.
    assert at_the_end[0] > 0
    assert seen[0] == []


def whole(model: nn.Module, name: str, full: dict[str, Tensor]) -> Tensor:
    """This rank's part of ``full[name]``: all of it, on one rank."""
    return full[name].view_as(model.get_parameter(name))


@pytest.mark.req("S1-37")
@all_strategies
def test_the_host_sees_no_gradient_before_its_copy_is_whole(
    one_rank: World, strategy: ShardingStrategy
) -> None:
    """During backward the leaves show none; after it, all of it, also the sum of two.

    NO_SHARD is where FSDP1 raced.
    """
    watch_a_backward(one_rank, strategy)


@pytest.mark.req("S1-37")
def test_the_cpu_waits_once_in_a_step(
    one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not per unit: at the end of backward, or of a forward that none follows."""
    model, _ = units_of(ShardingStrategy.FULL_SHARD)
    x = wide_input(6)(0, 0)
    model(x)
    waits: list[object] = []
    monkeypatch.setattr(Streams, "synchronize", lambda self: waits.append(self))

    loss = loss_of(model, x)
    assert waits == []
    backward(loss)
    assert len(waits) == 1
    with torch.no_grad():
        model(x)
    assert len(waits) == 2


class Twice(nn.Module):
    """A linear whose gradients come in two parts, the second by a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear twice, once recomputed inside backward."""
        again = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)
        y: Tensor = self.linear(x) + again
        return y


def test_two_reductions_in_one_backward_add_up(one_rank: World) -> None:
    """The second finds the first still on its way, and is added behind it."""
    model = nn.Sequential(nn.Linear(6, 6), Twice())
    plain = copy.deepcopy(model)
    fully_shard(model[1], cpu_offload=OFFLOAD)
    fully_shard(model, cpu_offload=OFFLOAD)
    x = wide_input(6)(0, 0)
    expected = gradients_of(plain, [x, x])

    with slow_copies(model):
        for _ in range(2):
            backward(loss_of(model, x))

    for name, grad in gradients(model).items():
        assert grad is not None
        torch.testing.assert_close(grad, 2 * whole(model, name, expected))


def test_a_gradient_that_the_user_set_is_added_to(one_rank: World) -> None:
    """Like one that was reduced; a parameter without one starts from zero."""
    model, plain = units_of(ShardingStrategy.FULL_SHARD)
    x = wide_input(6)(0, 0)
    expected = gradients_of(plain, [x])
    backward(loss_of(model, x))
    first = model.get_submodule("0")
    first.weight.grad = torch.ones(6, 6)
    first.bias.grad = None

    with slow_copies(model):
        backward(loss_of(model, x))

    got = gradients(model)
    assert got["0.weight"] is not None
    assert got["0.bias"] is not None
    torch.testing.assert_close(got["0.weight"], expected["0.weight"] + 1)
    torch.testing.assert_close(got["0.bias"], expected["0.bias"])


@pytest.mark.parametrize("first", [True, False])
def test_a_sharded_parameter_used_beside_its_unit_gets_both_gradients(
    one_rank: World, first: bool
) -> None:
    """What autograd adds on the host meanwhile is added to what the device sends.

    Backward comes last to what was computed first.
    """
    model, plain = units_of(ShardingStrategy.FULL_SHARD)
    x = wide_input(6)(0, 0)
    expected = gradients_of(plain, [x])
    bias = model.get_parameter("2.bias")

    with slow_copies(model):
        for _ in range(2):
            early = bias.sum()
            loss = loss_of(model, x)
            backward(loss + (early if first else bias.sum()))

    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, 2 * (expected["2.bias"] + 1))


def test_gradients_in_flight_are_dropped_when_backward_raises(one_rank: World) -> None:
    """The next step's gradients are its own."""
    model, plain = units_of(ShardingStrategy.FULL_SHARD)
    x = wide_input(6)(0, 0)
    expected = gradients_of(plain, [x])

    def fail(_: Tensor) -> None:
        raise KeyError("on purpose")

    with slow_copies(model) as waiting:
        y = x.clone().requires_grad_()
        loss = loss_of(model, y)
        y.register_hook(fail)  # type: ignore[no-untyped-call]  # torch has no types there
        with pytest.raises(KeyError, match="on purpose"):
            backward(loss)
        assert waiting
        backward(loss_of(model, x))

    for name, grad in gradients(model).items():
        assert grad is not None
        torch.testing.assert_close(grad, whole(model, name, expected))


def test_the_option_takes_the_words_of_torch(one_rank: World) -> None:
    """``CPUOffload(False)`` and None are no offload."""
    for option in (None, CPUOffload(), CPUOffload(offload_params=False)):
        model = FullyShardedDataParallel(tiny_mlp(), cpu_offload=option)
        assert not any(handle.layout.offload for handle in _get_fsdp_handles(model))
