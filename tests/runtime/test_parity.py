"""Training on live ranks equals training the plain model, and the peers' results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fsdp2
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import ShardingStrategy, clip_grad_norm_, fully_shard, no_sync
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    Optimize,
    adamw,
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    gpt_units,
    gradients_of,
    loss_of,
    sgd,
    tolerance_at,
    train,
    train_reference,
    trained_reference,
    wide_input,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
OPTIMIZERS: list[Optimize] = [sgd, adamw]


def train_gpt(
    world: World,
    path: str,
    strategy: ShardingStrategy,
    optimize: Optimize,
    *,
    tied: bool = False,
    max_norm: float | None = None,
) -> None:
    """Three steps of a small GPT, sharded by block, against the reference."""
    model = TinyGPT(tied_head=tied)
    plain: nn.Module = TinyGPT(tied_head=tied)
    sharded = apply_units(model, gpt_units(model), path=path, strategy=strategy)
    clip = None
    tolerance = tolerance_at(world.world_size)
    if max_norm is None:
        plain, expected = trained_reference(
            TinyGPT, world.world_size, gpt_input, optimize, tied_head=tied
        )
    else:
        norm = max_norm
        clip = lambda m: clip_grad_norm_(m, norm)  # noqa: E731
        theirs = lambda m: nn.utils.clip_grad_norm_(m.parameters(), norm)  # noqa: E731
        tolerance = 1e-5
        expected = train_reference(
            plain, world.world_size, gpt_input, optimize, clip=theirs
        )
    losses = train(sharded, world.rank, gpt_input, optimize, clip=clip)

    mine = [step[world.rank] for step in expected]
    assert_same_training(sharded, plain, losses, mine, tolerance=tolerance)
    assert world.all_equal(sharded.state_dict())


@pytest.mark.req("S2-10")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("optimize", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_small_gpt_trains_as_the_plain_one(
    ranks: RankCount,
    world_size: int,
    strategy: ShardingStrategy,
    optimize: Optimize,
    path: str,
) -> None:
    """Losses and weights of three steps are equal, bitwise at one and two ranks."""
    ranks(world_size).run(train_gpt, path, strategy, optimize)


@pytest.mark.req("B-22")
@on_ranks(1, 2, 4)
def test_tied_embeddings_and_clipping_train_as_the_plain_model(world: World) -> None:
    """The tied weight is reduced once, and the clipped steps are the unsharded ones.

    Tied head, clipped gradients.
    """
    train_gpt(world, "composable", STRATEGIES[0], adamw, tied=True, max_norm=0.05)


def ddp(model: TinyGPT) -> nn.Module:
    """Torch's DDP."""
    return DistributedDataParallel(model)


def fsdp1(model: TinyGPT) -> nn.Module:
    """Torch's FSDP1, a unit per block."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = _fsdp1(block)
    return _fsdp1(model)


def _fsdp1(module: nn.Module) -> nn.Module:
    return TorchFSDP1(module, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(model: TinyGPT) -> nn.Module:
    """Torch's FSDP2, a unit per block."""
    for block in model.blocks:
        torch_fsdp2(block)
    return cast(nn.Module, torch_fsdp2(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [ddp, fsdp1, fsdp2])
@on_ranks(2)
def test_losses_equal_those_of_torchs_own(
    world: World, wrap: Callable[[TinyGPT], nn.Module]
) -> None:
    """DDP, FSDP1 and FSDP2 of torch see the same four losses.

    Equal losses step by step; a wrong gradient would show in the next loss.
    """
    model = TinyGPT()
    peer = wrap(copy.deepcopy(model))
    ours = apply_units(model, gpt_units(model))

    mine = train(ours, world.rank, gpt_input, adamw, steps=4)
    theirs = train(peer, world.rank, gpt_input, adamw, steps=4)

    assert mine == pytest.approx(theirs, rel=1e-5)
    assert len(set(mine)) == 4


def descend(model: nn.Module, gradients: dict[str, Tensor] | None = None) -> None:
    """One plain step along ``.grad``, or along ``gradients``."""
    for name, p in model.named_parameters():
        if gradients is None and not p.numel():
            assert p.grad is None  # the rank holds nothing of it
            continue
        gradient = p.grad if gradients is None else gradients[name]
        assert gradient is not None
        p.data -= 0.1 * gradient
        p.grad = None


def big_batch(model: nn.Module, world_size: int, steps: Sequence[int]) -> None:
    """Step along the sum over ``steps`` of the gradients averaged over ranks."""
    sums: dict[str, Tensor] = {}
    for step in steps:
        inputs = [gpt_input(step, rank) for rank in range(world_size)]
        for name, value in gradients_of(model, inputs).items():
            sums[name] = sums[name] + value if name in sums else value.clone()
    descend(model, sums)


@pytest.mark.parametrize("path", PATHS)
@on_ranks(1, 2)
def test_accumulation_without_communication_equals_the_big_batch(
    world: World, path: str
) -> None:
    """``no_sync`` sends no reduction, and the next backward reduces the sum.

    Two microbatches, the first without communication; gradients are their sum.
    """
    model = TinyGPT()
    plain = copy.deepcopy(model)
    sharded = apply_units(model, gpt_units(model), path=path)
    for step in range(2):
        big_batch(plain, world.world_size, [step, step + 9])

        with record_steps() as calls, no_sync(sharded):
            backward(loss_of(sharded, gpt_input(step, world.rank)))
        backward(loss_of(sharded, gpt_input(step + 9, world.rank)))
        descend(sharded)

        assert {call.op for call in calls} <= {"all_gather"}
    assert_same_training(sharded, plain, [], [], tolerance=1e-6)


class TwoDtypes(nn.Module):
    """A bfloat16 linear and a float32 norm, side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 6)`` to the same."""
        y: Tensor = self.norm(x + self.linear(x.bfloat16()).float())
        return y


def train_module(
    world: World, make: Callable[[], nn.Module], optimize: Optimize
) -> None:
    """Three steps of one unit against the reference, bit by bit at two ranks."""
    model = make()
    plain = copy.deepcopy(model)
    fully_shard(model)

    expected = train_reference(plain, world.world_size, wide_input(6), optimize)
    losses = train(model, world.rank, wide_input(6), optimize)

    mine = [step[world.rank] for step in expected]
    tolerance = tolerance_at(world.world_size)
    assert_same_training(model, plain, losses, mine, tolerance=tolerance)


@pytest.mark.req("D-08")
@pytest.mark.parametrize("optimize", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_dtypes_in_one_unit_train(
    ranks: RankCount, world_size: int, optimize: Optimize
) -> None:
    """A bfloat16 linear and a float32 norm need no units of their own."""
    ranks(world_size).run(train_module, TwoDtypes, optimize)


class Odd(nn.Module):
    """A 0-d, a one-element and a zero-size parameter beside a matrix with 2 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.short = nn.Parameter(torch.randn(2, 6) * 0.3)
        self.empty = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 6)`` to the same."""
        y = x * self.scale + self.shift + self.nothing.sum()
        z: Tensor = self.empty(y + x @ self.short.T @ self.short)
        return z


@pytest.mark.req("D-13", "X-28")
@pytest.mark.parametrize("optimize", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_scalars_and_empty_parameters_train(
    ranks: RankCount, world_size: int, optimize: Optimize
) -> None:
    """0-d, one element, no element, fewer rows than ranks: as in the plain model."""
    ranks(world_size).run(train_module, Odd, optimize)


@pytest.mark.req("D-11")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(1, 2)
def test_two_forwards_then_two_backwards(world: World, path: str) -> None:
    """Each backward finds the weights, and the gradients add up.

    Forward, forward, backward, backward: gradients are those of both losses.
    """
    model = TinyGPT()
    plain = copy.deepcopy(model)
    sharded = apply_units(model, gpt_units(model), path=path)
    big_batch(plain, world.world_size, [0, 1])

    losses = [loss_of(sharded, gpt_input(step, world.rank)) for step in range(2)]
    backward(losses[0])
    backward(losses[1])
    descend(sharded)

    assert_same_training(sharded, plain, [], [], tolerance=1e-6)
