"""Full parameters that are kept over a step of an optimizer, whatever its kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    ShardingStrategy,
    no_sync,
    reshard,
    set_reshard_after_backward,
    unshard,
)
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.optim.models import INPUT, Mixed, mixed, train_plain
from tests.optim.test_every_optimizer import EVERY, FUSED, WAYS, made
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    averaged_gradients,
    backward,
    differences,
    loss_of,
)
from tests.support.sharded import RankCount, both_paths, message_of
from tests.support.world import World

STALE = "PhaseError: The shards of fully sharded module "


def reshard_all(model: nn.Module) -> None:
    for state in _get_fsdp_states(model):
        reshard(state.module)


def check_refused(world: World, path: str, name: str, way: str) -> None:
    """Step while all is kept, get the error, go the way out, and train as plain."""
    model, plain = mixed(path), Mixed()
    ours, reference = made(model, name, way), made(plain, name, way)
    set_reshard_after_backward(model, False)
    for at in range(3):
        backward(loss_of(model, INPUT(at, world.rank)))
        ours.step()
        ours.zero_grad()
        text = message_of(partial(model, INPUT(at, world.rank)))
        assert text.startswith(STALE), (name, way, text)
        reshard_all(model)
    train_plain(plain, reference, world.world_size, range(3))

    assert differences(model.state_dict(), plain.state_dict()) == {}, (name, way)


@pytest.mark.few(1)
@pytest.mark.req("P-02")
@both_paths
@on_ranks(2)
def test_no_step_on_weights_that_are_kept_full_passes_unnoticed(
    world: World, path: str
) -> None:
    """Every optimizer, foreach, fused and neither: refused, and right after reshard."""
    for name in EVERY:
        for way in WAYS:
            if way != "fused" or name.split()[0] in FUSED:
                check_refused(world, path, name, way)


def accumulate(model: nn.Module, world: World, at: int) -> None:
    with no_sync(model):
        backward(loss_of(model, INPUT(2 * at, world.rank)))
    backward(loss_of(model, INPUT(2 * at + 1, world.rank)))


def check_kept_between(world: World, path: str, name: str, way: str) -> None:
    model = mixed(path, strategy=ShardingStrategy.SHARD_GRAD_OP)
    plain = Mixed()
    ours, reference = made(model, name, way), made(plain, name, way)
    for at in range(3):
        accumulate(model, world, at)
        ours.step()
        ours.zero_grad()
        sums: dict[nn.Parameter, Tensor] = {}
        for half in (2 * at, 2 * at + 1):
            averaged_gradients(plain, [INPUT(half, rank) for rank in range(2)])
            for p in plain.parameters():
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
        for p, total in sums.items():
            p.grad = total
        reference.step()

    apart = differences(model.state_dict(), plain.state_dict())
    assert all(value <= 1e-5 for value in apart.values()), (name, way, apart)


@pytest.mark.few(1)
@pytest.mark.req("P-02")
@both_paths
@on_ranks(2)
def test_weights_kept_between_micro_batches_train_as_plain(
    world: World, path: str
) -> None:
    """``no_sync`` keeps them until the backward that reduces, and nothing is stale."""
    for name in ("SGD momentum", "AdamW", "Adam amsgrad", "Adagrad"):
        for way in WAYS:
            check_kept_between(world, path, name, way)


class Pair(nn.Module):
    """Two units of which each may be trained alone; one rank holds none of ``gain``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.gain = nn.Linear(8, 8), Gain()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gain(self.body(x))
        return out


class Gain(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def pair() -> Any:
    model = apply_units(Pair(), ["body", "gain"])
    model(torch.ones(1, 8))
    return model


def check_whose_step(world: World) -> dict[str, str]:
    """What the forward after each program raises."""
    texts = {}
    x = torch.ones(2, 8)

    model = pair()
    other = optim.AdamW(model.gain.parameters(), fused=True)
    backward(loss_of(model, x))
    unshard(model.body)
    other.step()
    texts["others step"] = message_of(lambda: model(x))

    model = pair()
    own = optim.AdamW(model.gain.parameters(), fused=True)
    backward(loss_of(model, x))
    unshard(model.gain)
    own.step()
    texts["a rank holds nothing"] = message_of(lambda: model(x))

    model = pair()
    set_reshard_after_backward(model, False)
    fused = optim.SGD(model.parameters(), lr=0.1, fused=True)

    def closure() -> Tensor:
        loss = loss_of(model, x)
        backward(loss)
        return loss

    fused.step(closure)
    texts["closure"] = message_of(lambda: model(x))

    model = pair()
    late = optim.SGD(model.gain.parameters(), lr=0.1, fused=True)
    backward(loss_of(model, x))
    late.step()
    late.add_param_group({"params": list(model.body.parameters())})
    unshard(model.body)
    late.step()
    texts["added later"] = message_of(lambda: model(x))
    return texts


@pytest.mark.req("P-02")
def test_a_step_counts_for_the_units_whose_leaves_it_holds(ranks: RankCount) -> None:
    """Not for others; on every rank alike; also by a closure and in a late group."""
    for texts in ranks(2).run(check_whose_step):
        assert texts.pop("others step") == "nothing was raised"
        assert all(text.startswith(STALE) for text in texts.values()), texts
