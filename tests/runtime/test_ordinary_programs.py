"""Programs that users write, on modules and tools of torch that no other test has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

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
    STRATEGIES,
    adamw,
    apply_units,
    assert_same_training,
    averaged_gradients,
    backward,
    sgd,
)
from tests.support.world import World

WIDTH = 6


def features(step: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, *(shape or (WIDTH,)), generator=generator)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Case(NamedTuple):
    """A model, its units below the root, and the shape of a row of its input."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...] = ("0", "2")
    shape: tuple[int, ...] = (WIDTH,)
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


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
    [None, Arena(poison=True), Arena(shared=False)],
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
