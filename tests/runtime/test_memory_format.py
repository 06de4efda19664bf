"""Weights of convolutions keep their memory format: channels_last for 2-D and 3-D."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    Arena,
    Block,
    CPUOffload,
    DesyncError,
    FullyShardedDataParallel,
    Int8Wire,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    get_full_param,
    load,
    plan,
    save,
    unshard_params,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World, fake_world

pytestmark = pytest.mark.req("M-07")
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]
ARENAS = [None, Arena(poison=True, reduce=True), Arena(shared=False, poison=True)]


SEEN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
"""Shapes and strides of weights in the last forward, by kind of layer and shape."""


class Conv2d(nn.Conv2d):
    """Notes what its forward sees."""

    def forward(self, x: Tensor) -> Tensor:
        """As its base class."""
        SEEN[f"2d of {self.in_channels}"] = self.weight.shape, self.weight.stride()
        return super().forward(x)


class Conv3d(nn.Conv3d):
    """Notes what its forward sees."""

    def forward(self, x: Tensor) -> Tensor:
        """As its base class."""
        SEEN["3d"] = self.weight.shape, self.weight.stride()
        return super().forward(x)


def seen() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What the last forward saw, once."""
    found = dict(SEEN)
    SEEN.clear()
    return found


class Net(nn.Module):
    """Two convolutions with biases, a norm, and one in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = Conv2d(8, 6, 3, padding=1)
        self.third = Conv3d(2, 5, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(batch, 3, height, width)`` to a number."""
        y = self.second(self.norm(self.first(images)).relu())
        z = self.third(y.view(len(y), 2, 3, *y.shape[2:]))
        out: Tensor = y.square().mean() + z.square().mean()
        return out


STRIDES = {
    "2d of 3": ((8, 3, 3, 3), (27, 1, 9, 3)),
    "2d of 8": ((6, 8, 3, 3), (72, 1, 24, 8)),
    "3d": ((5, 2, 3, 3, 3), (54, 1, 18, 6, 2)),
}


def plain() -> Net:
    """In channels_last; the layer in three dimensions in channels_last_3d."""
    model = Net()
    for layer, kind in (
        (model.first, torch.channels_last),
        (model.second, torch.channels_last),
        (model.third, torch.channels_last_3d),
    ):
        layer.weight.data = layer.weight.data.contiguous(memory_format=kind)
    return model


def images(step: int) -> Tensor:
    """The same on all ranks, so that averages of equal gradients are these."""
    made = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step))
    return made.contiguous(memory_format=torch.channels_last)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Any]:
    """Losses of steps, bit by bit."""
    losses = []
    for step in range(steps):
        loss = model(images(step))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With state of the shape of each parameter."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    """The full state has the plain model's values, shapes and strides."""
    wanted, found = expected.state_dict(), model.state_dict()
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(value, found[name]), name
        assert value.stride() == found[name].stride(), name


def check_training(
    world: World,
    strategy: ShardingStrategy,
    offload: bool,
    path: Path,
    arena: Arena | None = None,
) -> None:
    """Five steps, a checkpoint to another layout and back, and writes by hand."""
    expected = plain()
    model = plain()
    options: dict[str, Any] = {
        "strategy": strategy,
        "cpu_offload": CPUOffload(offload_params=offload),
        "arena": arena,
    }
    for layer in (model.first, model.second):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    ours, theirs = adam(model), adam(expected)

    losses, strides = train(expected, theirs, 3), seen()
    assert train(model, ours, 3) == losses
    assert seen() == strides == STRIDES
    assert_equal(model, expected)
    for name in ("first.weight", "third.weight"):
        whole = get_full_param(model, name)
        assert torch.equal(whole, expected.get_parameter(name))
        assert whole.stride() == expected.get_parameter(name).stride()

    # To a model of contiguous weights, and on a plain one; values are in order.
    save(path, model, ours)
    other = Net()
    other_optimizer = adam(fully_shard(other))
    load(path, other, other_optimizer)
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])
    again = fully_shard(plain(), **options)
    again_optimizer = adam(again)
    load(path, again, again_optimizer)
    assert_equal(again, expected)
    assert train(again, again_optimizer, 2) == train(expected, theirs, 2)
    assert_equal(again, expected)

    # Written to in full, loaded and copied.
    with unshard_params(again):
        for parameter in again.parameters():
            parameter.data.mul_(0.5)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(0.5)
    assert_equal(again, expected)
    again.load_state_dict(expected.state_dict())
    twin = copy.deepcopy(again)
    assert expected(images(9)).item() == twin(images(9)).item()
    assert seen() == STRIDES


@pytest.mark.parametrize("arena", ARENAS, ids=["none", "shared", "own"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
@on_ranks(1, 2)
def test_training_and_state_are_those_of_the_plain_model(
    world: World,
    strategy: ShardingStrategy,
    offload: bool,
    arena: Arena | None,
    tmp_path: Path,
) -> None:
    """Bit by bit, with the same strides in forward and in state dicts."""
    check_training(world, strategy, offload, tmp_path / "saved", arena)


@on_ranks(2)
def test_low_precision_frozen_weights_and_writes_in_forward(world: World) -> None:
    """The cast keeps the format; so do layouts that are divided by freezing."""
    model, expected = plain(), plain()
    half = torch.bfloat16
    fully_shard(
        model, mixed_precision=MixedPrecision(param_dtype=half, buffer_dtype=half)
    )
    low = copy.deepcopy(expected).bfloat16()
    assert low(images(0).bfloat16()).item() == model(images(0)).item()
    assert seen() == STRIDES

    model = fully_shard(plain())
    for each in (model, expected):
        each.first.requires_grad_(False)
        backward(each(images(0)))
        each.first.requires_grad_(True)
        each.second.requires_grad_(False)
    assert expected(images(1)).item() == model(images(1)).item()
    assert seen() == STRIDES

    # In place; and through ``.data``, for which the first forwards look.
    for through_data in (False, True):
        model, expected = plain(), plain()
        fully_shard(model)
        for each in (model, expected):
            each.register_forward_pre_hook(double_data if through_data else double)
            with torch.no_grad():
                each(images(0))
        value = model.state_dict()["first.weight"]
        assert torch.equal(value, expected.first.weight)
        assert not torch.equal(value, plain().first.weight)


def double(module: Net, args: object) -> None:
    """Write in place."""
    module.first.weight.mul_(2)


def double_data(module: Net, args: object) -> None:
    """Write in a way that no version counts."""
    module.first.weight.data.mul_(2)


def test_what_cannot_keep_the_format_is_contiguous() -> None:
    """A block or a wire format that cuts or scales parts of rows."""
    for options in ({"block": Block.ELEMENT}, {"wire": Int8Wire()}):
        (unit,) = plan(plain(), world_size=2, **options).units
        assert not any(region.is_strided for region in unit.regions)
    (unit,) = plan(plain(), world_size=2).units
    assert any(region.is_strided for region in unit.regions)


def test_the_wrapper_keeps_the_format() -> None:
    """As the function does."""
    with fake_world(2):
        model = FullyShardedDataParallel(plain())
        model(images(0))
        assert seen() == STRIDES


@on_ranks(2)
def test_ranks_in_different_formats_are_told(world: World) -> None:
    """Before a rank reads the rows of another in a wrong order."""
    model = fully_shard(plain() if world.rank else Net())

    with pytest.raises(DesyncError, match=r"third\.weight|first\.weight"):
        model(images(0))
