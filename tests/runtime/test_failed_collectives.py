"""After a collective that failed, this rank is as it was between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, fully_shard
from composable_fsdp.comm import collectives
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.world import fake_world


class Lost(RuntimeError):
    """Raised as a backend raises that has lost a peer."""


class LostWork:
    """A collective that fails when it is waited for, as often as it is."""

    def wait(self) -> None:
        """Raise."""
        raise Lost("Connection closed by peer")


def shard(**options: Any) -> nn.Sequential:
    """Four units below a root, on rank 0 of two ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """``failing[name] = k``: the collective ``name`` fails from its k-th call on."""
    left: dict[str, int] = {}
    for name in ("all_gather_flat", "reduce_scatter_flat"):
        real = getattr(collectives, name)

        def call(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            if name in left:
                left[name] -= 1
                if left[name] < 0:
                    return LostWork()
            return real(*args, **kwargs)

        monkeypatch.setattr(collectives, name, call)
    with fake_world(2):
        yield left


def step(model: nn.Module, x: Tensor) -> None:
    """One forward and backward."""
    model(x).sum().backward()


@pytest.mark.req("X-06")
@pytest.mark.parametrize("calls", range(3))
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("what", ["all_gather_flat", "reduce_scatter_flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_unit_whose_collective_failed_is_sharded_and_its_memory_free(
    failing: dict[str, int], what: str, strategy: str, calls: int, *, prefetch: bool
) -> None:
    """The step after it runs, once the collectives do; a state dict before it, too."""
    model = shard(strategy=ShardingStrategy[strategy], forward_prefetch=prefetch)
    x = torch.ones(2, 4)
    step(model, x)
    model.zero_grad()

    failing[what] = calls
    with pytest.raises(Lost):
        step(model, x)
    failing.clear()
    # What was in flight when the step failed is told once more, and then is gone.
    with suppress(Lost):
        model.state_dict()
    model.state_dict()

    require_between_steps(model)
    model.zero_grad()
    step(model, x)
    assert all(p.grad is not None for p in model.parameters() if p.numel())


@pytest.mark.req("X-06")
def test_a_reduction_that_failed_behind_a_raise_is_told_once(
    failing: dict[str, int],
) -> None:
    """A module's backward raises while the reduction of another unit is in flight."""
    model = shard()
    x = torch.ones(2, 4)
    step(model, x)
    model.zero_grad()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = model[2].register_full_backward_pre_hook(fail)
    failing["reduce_scatter_flat"] = 0
    with pytest.raises(ZeroDivisionError):
        step(model, x)
    hook.remove()
    failing.clear()
    with pytest.raises(Lost):
        model.state_dict()
    model.state_dict()

    require_between_steps(model)


def require_between_steps(model: nn.Module) -> None:
    """Every unit is sharded and idle, and has no memory for full values."""
    for handle in _get_fsdp_handles(model):
        assert handle.residency is Residency.SHARDED
        assert handle.phase is Phase.IDLE
        assert not handle.reduction.has_memory
        for region in handle.layout.regions:
            assert region.full.buffer.untyped_storage().nbytes() == 0
