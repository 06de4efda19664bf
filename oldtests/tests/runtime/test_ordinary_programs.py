"""Programs that users write, on modules and tools of torch that no other test has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

from composable_fsdp import (
    Block,
    CPUOffload,
    ShardingStrategy,
    fully_shard,
    get_full_param,
    load,
    plan,
    save,
    unshard_params,
)
from composable_fsdp.features import Arena, Int8Wire
from tests.runtime.parity import trains_as
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    assert_same_training,
    averaged_gradients,
    backward,
    loss_of,
    sgd,
    train,
)
from tests.support.world import World

WIDTH = 6
STEPS = 3


def features(step: int, rank: int, *shape: int) -> Tensor:
    """Inputs ``(3, *shape)`` of (step, rank)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, *(shape or (WIDTH,)), generator=generator)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


class Packed(nn.Module):
    """One unit gives a packed sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Packs(), nn.GRU(WIDTH, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = rnn.pad_packed_sequence(self.last(self.first(x))[0], batch_first=True)
        return y


class Packs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return rnn.pack_padded_sequence(super().forward(x), [4, 3, 1], True)


class Attends(nn.Module):
    """The mask leaves out one key, and the weights are a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, -1] = True
        y, weights = self.first(x, x, x, key_padding_mask=mask)
        return torch.cat([x + y, weights], 2)


def chain(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Case(NamedTuple):
    """A model, its units below the root, and the shape of a row of its input."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...] = ("0", "2")
    shape: tuple[int, ...] = (WIDTH,)
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw


CASES = {
    "packed sequences": Case(Packed, ("first", "last"), (4, WIDTH)),
    "attention weights": Case(Attends, ("first",), (4, WIDTH)),
    "weight norm": Case(lambda: chain(parametrizations.weight_norm(square()))),
    "orthogonal weights": Case(lambda: chain(parametrizations.orthogonal(square()))),
    "spectral norm by hooks": Case(lambda: chain(nn.utils.spectral_norm(square()))),
}


def build(case: Case) -> nn.Module:
    """The same model at each call; pruned models cannot be copied."""
    torch.manual_seed(0)
    return case.build()


def train_replicas(case: Case, world: World) -> tuple[nn.Module, list[float]]:
    """Train one plain model per rank, by data parallelism; this rank's and losses."""
    replicas = [build(case) for _ in range(world.world_size)]
    optimizers = [case.optimize(each.parameters()) for each in replicas]
    losses = []
    for step in range(STEPS):
        for rank, each in enumerate(replicas):
            loss = loss_of(each, features(step, rank, *case.shape))
            backward(loss)
            losses += [loss.item()] if rank == world.rank else []
        for same in zip(*(each.parameters() for each in replicas), strict=True):
            grads = [p.grad for p in same if p.grad is not None]
            for p in same if grads else ():
                p.grad = torch.stack(grads).mean(0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return replicas[world.rank], losses


@pytest.mark.few(5)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_a_program_trains_and_evaluates_as_the_plain_one(
    world: World, name: str, path: str
) -> None:
    """With buffers of each rank's own."""
    case = CASES[name]
    model = apply_units(build(case), case.units, path=path)

    def make(step: int, rank: int) -> Tensor:
        return features(step, rank, *case.shape)

    losses = train(model, world.rank, make, case.optimize, steps=STEPS)
    reference, expected = train_replicas(case, world)

    assert_same_training(model, reference, losses, expected, tolerance=1e-5)
    x = features(9, 0, *case.shape)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), reference.eval()(x))


@on_ranks(2)
def test_a_rank_whose_batch_is_empty_takes_part(world: World) -> None:
    """Its gradients are zeros, which count in the mean."""
    torch.manual_seed(0)
    plain = nn.Sequential(block(), nn.LayerNorm(WIDTH))
    model = apply_units(copy.deepcopy(plain), ["0", "1"])

    def loss(each: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = each(x).square().sum()
        return y

    batches = [features(0, 0), features(0, 1)[:0]]
    averaged_gradients(plain, batches, loss)
    backward(loss(model, batches[world.rank]))
    for each in (plain, model):
        sgd(each.parameters()).step()

    assert_same_training(model, plain, [], [], tolerance=1e-6)


# ---- memory formats ----


def convolutions(*, strided: bool = True) -> Any:
    """Two convolutions and one in three dimensions, in channels_last."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.Unflatten(1, (2, 3)),
        nn.Conv3d(2, 5, 3, padding=1),
    )
    if strided:
        model[:4].to(memory_format=torch.channels_last)
        model[5].to(memory_format=torch.channels_last_3d)
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    """The full state has the plain model's values, shapes and strides."""
    wanted, found = expected.state_dict(), model.state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, check_stride=True)


@pytest.mark.req("M-07")
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "arena",
    [None, Arena(poison=True, reduce=True), Arena(shared=False)],
    ids=["none", "shared", "own"],
)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=lambda each: each.name)
@on_ranks(1, 2)
def test_convolutions_keep_their_memory_format(
    world: World,
    strategy: ShardingStrategy,
    offload: bool,
    arena: Arena | None,
    tmp_path: Path,
) -> None:
    """In forward and in state dicts; through checkpoints to other formats and back,
    freezing, writes in full, and copies."""
    option = CPUOffload(offload_params=offload)
    options: dict[str, Any] = {"strategy": strategy, "cpu_offload": option}
    expected, seen = convolutions(), list[tuple[int, ...]]()
    model = apply_units(convolutions(), ["0", "3"], arena=arena, **options)
    model.get_submodule("0").register_forward_pre_hook(
        lambda module, _: seen.append(module.weight.stride())
    )
    make = lambda step, rank: features(step, 0, 3, 4, 4)  # noqa: E731
    model.get_submodule("0").requires_grad_(False)
    expected[0].requires_grad_(False)
    trains_as(world, model, expected, make, adamw)
    for each in (model, expected):
        each.requires_grad_(True)
    trains_as(world, model, expected, make, adamw)
    assert set(seen) == {expected[0].weight.stride()} == {(27, 1, 9, 3)}
    assert_equal(model, expected)
    assert get_full_param(model, "5.weight").stride() == expected[5].weight.stride()

    save(tmp_path / "saved", model)
    other = fully_shard(convolutions(strided=False))
    load(tmp_path / "saved", other)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])
    again = fully_shard(convolutions(), **options)
    load(tmp_path / "saved", again)
    with unshard_params(again), torch.no_grad():
        for parameter in (*again.parameters(), *expected.parameters()):
            parameter.mul_(0.5)
    assert_equal(again, expected)
    again.load_state_dict(expected.state_dict())
    assert_equal(copy.deepcopy(again), expected)


def test_what_cannot_keep_the_format_is_contiguous() -> None:
    """A block or a wire format that cuts or scales parts of rows."""
    for options in ({"block": Block.ELEMENT}, {"wire": Int8Wire()}):
        (unit,) = plan(convolutions(), world_size=2, **options).units
        assert not any(region.is_strided for region in unit.regions)
    (unit,) = plan(convolutions(), world_size=2).units
    assert any(region.is_strided for region in unit.regions)
