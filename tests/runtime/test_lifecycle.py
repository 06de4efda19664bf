"""What a step leaves behind and the next one finds: memory, phases, broken steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    ShardingStrategy,
    fully_shard,
    unshard_params,
)
from composable_fsdp.comm import collectives
from composable_fsdp.errors import PhaseError
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.runtime.forward import post_forward, pre_forward
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import TinyGPT, module_at, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
)
from tests.support.world import World, fake_world


@pytest.mark.req("S1-38")
@on_ranks(2)
def test_forward_and_backward_are_functions_on_a_state(world: World) -> None:
    """Pre- and post-forward called with a state, around no forward at all."""
    model, plain = fully_shard(tiny_mlp(4)), tiny_mlp(4)
    state = fully_shard.state(model)
    assert state is not None
    x = torch.ones(2, 4) * (world.rank + 1)
    changed = pre_forward(state, model, (x.requires_grad_(),), {})
    assert changed is not None
    (alias,), _ = changed
    assert state.handle.is_full
    y = module_at(model, "0")(alias)
    post_forward(state, model, (alias,), y)
    backward(y.sum())

    require_between_steps(model)
    assert torch.equal(y, module_at(plain, "0")(x.detach()))
    weight = plain.get_parameter("0.weight")
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 4))
    for p in module_at(model, "0").parameters():
        assert (p.grad is None) == (not p.numel())


# ---- after a collective that failed ----


class Lost(RuntimeError):
    """Raised as a backend raises that has lost a peer."""


class LostWork:
    """A collective that fails when it is waited for, as often as it is."""

    def wait(self) -> None:
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
    model(x).sum().backward()


@pytest.mark.req("X-06")
@pytest.mark.few(8)
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


def require_between_steps(model: nn.Module) -> None:
    """Every unit is sharded and idle, and has no memory for full values."""
    for handle in _get_fsdp_handles(model):
        assert handle.residency is Residency.SHARDED
        assert handle.phase is Phase.IDLE
        assert not handle.reduction.has_memory
        for region in handle.layout.regions:
            assert region.full.buffer.untyped_storage().nbytes() == 0
        assert all(params[name] is leaf for params, name, leaf, _ in handle.swaps)


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_copy_in_the_middle_of_a_step_is_refused(world: World, path: str) -> None:
    """Each moment is named; between forward and backward the shards can be copied."""
    model = apply_units(TinyGPT(), gpt_units(TinyGPT()), path=path)
    inner = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))

    def attempt(*_: object) -> None:
        with pytest.raises(PhaseError, match=r"copy\.deepcopy was called on") as error:
            copy.deepcopy(model)
        tried.append(str(error.value))

    tried: list[str] = []
    hook = inner.register_forward_hook(attempt)
    y = model(gpt_input(0, world.rank))
    hook.remove()
    between = copy.deepcopy(model)
    y.register_hook(attempt)
    backward(y.sum())
    with unshard_params(model):
        attempt()

    for text, where in zip(tried, ("forward", "backward", "unshard_par"), strict=True):
        assert f"inside {'the ' * (where == 'forward')}{where}" in text
    expected = model.state_dict()
    assert all(torch.equal(v, expected[n]) for n, v in between.state_dict().items())
