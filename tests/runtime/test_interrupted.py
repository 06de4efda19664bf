"""What a unit leaves that was interrupted, or could not enter, and what it keeps."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    register_forward_method,
    unshard_params,
)
from composable_fsdp.comm import collectives
from composable_fsdp.errors import PhaseError
from composable_fsdp.features import Int8Wire
from composable_fsdp.runtime import forward
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).tanh() + 1
        return out


class Refusing(tuple[Any, ...]):
    """A container that cannot be rebuilt while ``refuses``."""

    refuses = False

    @classmethod
    def _make(cls, items: Any) -> Refusing:
        if cls.refuses:
            raise ValueError("refused")
        return cls(items)


class Rebuilt(nn.Module):
    """Calls a block with a list, and keeps weak references to what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = Layer(), Listed()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, given: tuple[Tensor]) -> Tensor:
        inner = self.first(given[0])
        self.seen.append(weakref.ref(inner))
        out: Tensor = self.block([inner])
        return out

    def generate(self, given: tuple[Tensor]) -> Tensor:
        return self.forward(given)


class Listed(Layer):
    """A layer of the tensor in a list."""

    def forward(self, given: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(given[0])


LOW = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)


def gradients(model: nn.Module) -> list[float]:
    """Sums of the gradients, which this frees."""
    found = [0.0 if p.grad is None else float(p.grad.sum()) for p in model.parameters()]
    model.zero_grad()
    return found


@on_ranks(1)
def test_a_method_that_cannot_enter_leaves_nothing_behind(world: World) -> None:
    """Ctrl-C in the wait for the weights, and an input that cannot be cast."""
    model = Rebuilt()
    for unit in (model.block, model):
        fully_shard(unit, mixed_precision=LOW)
    register_forward_method(model, "generate")
    batch = Refusing([torch.ones(2, 4)])
    expected: list[float] = []
    for _ in range(3):
        backward(model.generate(batch).sum())
        expected = gradients(model)
    assert all(expected)
    stop = mock.patch.object(forward, "wait_unsharded", side_effect=KeyboardInterrupt)
    with stop, pytest.raises(KeyboardInterrupt):
        model.generate(batch)
    refuse = mock.patch.object(Refusing, "refuses", True)
    with refuse, pytest.raises(ValueError, match="refused"):
        model.generate(batch)

    backward(model.generate(batch).sum())

    assert gradients(model) == expected
    assert model.state_dict()


@pytest.mark.parametrize(
    ("sent", "at"), [("all_gather_flat", 0), ("reduce_scatter_flat", 1)]
)
@on_ranks(2)
def test_memory_that_the_backend_was_given_stays(
    world: World, sent: str, at: int
) -> None:
    """Ctrl-C after the backend got the call, and before the line that notes it."""
    model = nn.Sequential(Layer(), Layer())
    for unit in (*model, model):
        fully_shard(unit)
    x = torch.ones(2, 4)
    backward(model(x).sum())
    expected = gradients(model)
    send = getattr(collectives, sent)
    given: list[torch.UntypedStorage] = []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        given.extend(buffer.untyped_storage() for buffer in args[at])
        send(*args, **kwargs)
        raise KeyboardInterrupt

    stop = mock.patch.object(collectives, sent, interrupted)
    with stop, pytest.raises(KeyboardInterrupt):
        backward(model(x).sum())
    backward(model(x).sum())

    assert all(storage.nbytes() for storage in given)
    assert gradients(model) == expected


class Retried(nn.Module):
    """Runs its second layer after an error that it catches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            try:
                out: Tensor = self.second(self.first(x))
            except ConnectionError:
                continue
            return out
        raise AssertionError


@pytest.mark.parametrize("wire", [None, Int8Wire()])
@pytest.mark.parametrize("ahead", [False, True])
@on_ranks(2)
def test_an_all_gather_that_raised_is_sent_again(
    world: World, ahead: bool, wire: Int8Wire | None
) -> None:
    """Where the forward catches the error, and calls the unit again."""
    check_retried(forward_prefetch=ahead, wire=wire)


@on_ranks(4)
def test_pieces_are_filled_again_after_an_all_gather_that_raised(world: World) -> None:
    """The backend may still read the old ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_retried(device_mesh=mesh, strategy=ShardingStrategy.HFSDP)


def check_retried(**options: Any) -> None:
    model = Retried()
    for unit in (model.first, model.second, model):
        fully_shard(unit, **options)
    x = torch.ones(2, 4)
    for _ in range(4):
        backward(model(x).sum())
        expected = gradients(model)
    send, sent = collectives.all_gather_flat, 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == 2:  # of the second layer
            raise ConnectionError
        return send(*args, **kwargs)

    with mock.patch.object(collectives, "all_gather_flat", broken):
        out = model(x)
    backward(out.sum())

    assert sent > 2
    assert gradients(model) == expected


@on_ranks(2)
def test_a_forward_that_returns_nothing_inside_a_handler(world: World) -> None:
    """The error that a program handles is not one of the forward."""

    class Filling(Layer):
        def forward(self, x: Tensor, out: dict[str, Tensor]) -> None:  # type: ignore[override]
            out["y"] = super().forward(x)

    model = fully_shard(Filling())
    for _ in range(2):
        out: dict[str, Tensor] = {}
        try:
            raise MemoryError
        except MemoryError:
            model(torch.ones(2, 4), out)
        backward(out["y"].sum())
    assert any(gradients(model))


@pytest.mark.parametrize("low", [None, LOW])
@on_ranks(1)
def test_no_input_outlives_the_graph(world: World, low: MixedPrecision | None) -> None:
    """Neither in a container that the unit copies, nor before a cast."""
    model = Rebuilt()
    for unit in (model.block, model):
        fully_shard(unit, mixed_precision=low)
    for _ in range(6):
        backward(model((torch.ones(2, 4),)).sum())
    assert not any(each() is not None for each in model.seen)


@on_ranks(1)
def test_a_recomputation_inside_unshard_params_is_refused(world: World) -> None:
    """By the words of a forward there, and the next gradients are right."""
    model = nn.Sequential(Layer(), Layer())
    fully_shard(model[1])
    fully_shard(model)

    def loss() -> Tensor:
        found = checkpoint(lambda x: model(x).square().sum(), x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found

    x = torch.ones(2, 4)
    backward(loss())
    expected = gradients(model)
    for unit in (model, model[1]):
        late = loss()
        told = pytest.raises(PhaseError, match="was called inside unshard_params")
        with unshard_params(unit, recurse=False), told:
            backward(late)
        backward(loss())
        assert gradients(model) == expected
