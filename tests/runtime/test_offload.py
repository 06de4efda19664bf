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
    ShardingStrategy,
    fully_shard,
)
from composable_fsdp.comm.device import Streams
from composable_fsdp.runtime import offload
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.offloading import (
    OFFLOAD,
    train_offloaded,
)
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    backward,
    gradients_of,
    loss_of,
    tolerance_at,
    wide_input,
)
from tests.support.sharded import RankCount
from tests.support.world import World

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


@pytest.mark.few(4)
@pytest.mark.req("S2-08")
@pytest.mark.parametrize("path", PATHS)
@all_strategies
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_offloaded_gpt_trains_as_the_plain_one(
    ranks: RankCount, world_size: int, strategy: ShardingStrategy, path: str
) -> None:
    """Losses and weights are equal, bitwise at one and two ranks; NO_SHARD included."""
    ranks(world_size).run(train_offloaded, path, strategy, tolerance_at(world_size))


# ---- copies that take their time --------------------------------------------


@contextmanager
def slow_copies(model: nn.Module) -> Iterator[list[Callable[[], object]]]:
    """Copies to the host wait for ``synchronize``; the target is NaN until then."""
    waiting: list[Callable[[], object]] = []

    def synchronize(_: object = None) -> None:
        while waiting:
            waiting.pop(0)()

    def issue(target: Tensor, source: Tensor) -> None:
        regions = [
            r for handle in _get_fsdp_handles(model) for r in handle.layout.trainable
        ]
        if any(source is region.gradient.shard for region in regions):
            synchronize()
            target.copy_(source)
        else:
            waiting.append(lambda: target.copy_(source))
            target.fill_(float("nan"))

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


@pytest.mark.req("S1-37")
@all_strategies
def test_the_host_sees_no_gradient_before_its_copy_is_whole(
    one_rank: World, strategy: ShardingStrategy
) -> None:
    """In backward the leaves show none; after it, all of it, also the sum of two."""
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
    return full[name].view_as(model.get_parameter(name))


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
