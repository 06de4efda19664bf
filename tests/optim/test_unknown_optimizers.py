"""Optimizers of unknown classes: what their step on parts shows, before it is taken."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    Block,
    FullyShardedDataParallel,
    ShardingStrategy,
    flat_parameters,
    fully_shard,
)
from tests.optim.models import INPUT, Mixed, mixed, train_plain, train_sharded
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, differences, loss_of
from tests.support.sharded import RankCount, both_paths, message_of
from tests.support.world import World


class Own(optim.Optimizer):
    """A hand-written optimizer: ``rule`` gives the update of one parameter."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        self.calls = 0
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.rule(p, group, self.state[p]), alpha=group["lr"])

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        raise NotImplementedError


class Orthogonal(Own):
    """Muon, under another name."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        x = grad_of(p)
        if p.ndim < 2:
            return x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x


class TrustRatio(Own):
    """LAMB, under another name."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        return grad_of(p) * (p.norm() / (grad_of(p).norm() + 1e-6))


class Factored(Own):
    """Adafactor's second moment."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        grad = grad_of(p)
        square = grad.square() + 1e-8
        if p.ndim < 2:
            return grad / square.mean().sqrt()
        rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
        return grad / (rows * columns / square.mean()).sqrt()


class Global(Own):
    """Clips by the norm of all parameters together."""

    def step(self, closure: Any = None) -> Any:
        grads = [grad_of(p) for g in self.param_groups for p in g["params"]]
        norm = torch.stack([grad.norm() for grad in grads if grad.numel()]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        return grad_of(p)


class Blocks(Own):
    """Momentum in 8 bits with a scale per 256 elements, and plain where that is odd."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        last = state.get("momentum", torch.zeros_like(p))
        momentum = 0.9 * last + grad_of(p)
        if p.numel() % 256 == 0:
            blocks = momentum.reshape(-1, 256)
            scale = blocks.abs().amax(1, keepdim=True) / 127 + 1e-12
            momentum = ((blocks / scale).round() * scale).reshape(p.shape)
        state["momentum"] = momentum
        return momentum


class Sign(Own):
    """Lion."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        state.setdefault("exp_avg", torch.zeros_like(p))
        update = state["exp_avg"] * group.get("beta", 0.9) + 0.1 * grad_of(p)
        state["exp_avg"].lerp_(grad_of(p), 0.01)
        return update.sign()


class Belief(Own):
    """AdaBelief, with a count of steps and a second attribute that is a closure."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        mean = state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9
        mean.add_(grad_of(p), alpha=0.1)
        spread = state["spread"] = state.get("spread", torch.zeros_like(p)) * 0.99
        spread.add_((grad_of(p) - mean).square(), alpha=0.01)
        return mean / (spread.sqrt() + 1e-3)


class RowCentred(Own):
    """Gradients less their mean over each row: of whole rows, as rows are cut."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        grad = grad_of(p)
        return grad - grad.mean(1, keepdim=True) if p.ndim > 1 else grad


class Noisy(Own):
    """Adds noise, so nothing can be compared."""

    def rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Any:
        return grad_of(p) + 0.01 * torch.randn_like(p)


class Around(Own):
    """Holds another optimizer, whose step is its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.base = optim.SGD(params, lr)

    def step(self, closure: Any = None) -> Any:
        self.base.step()


class Closing(Own):
    """Steps with a closure only."""

    def step(self, closure: Any = None) -> Any:
        closure()


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


NEEDS_WHOLE = (Orthogonal, TrustRatio, Factored, Global, Blocks)
BY_ELEMENT = (Sign, Belief, RowCentred)
UNSURE = (Noisy, Around, Closing)
Collect = Callable[[nn.Module], Iterable[nn.Parameter]]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.req("P-16")
@both_paths
@on_ranks(2)
def test_an_unknown_optimizer_that_needs_whole_parameters_is_refused(
    world: World, path: str
) -> None:
    """At its first step, by what it does: norms, factors, matrices, blocks of state."""
    for kind in NEEDS_WHOLE:
        for collect in (trainable, flat_parameters):
            model = mixed(path)
            ours = kind(collect(model))
            backward(loss_of(model, INPUT(0, world.rank)))
            before = {name: v.clone() for name, v in model.state_dict().items()}

            text = message_of(ours.step)

            assert text.startswith(f"CompositionError: {kind.__name__} holds "), text
            assert "its step on parts is not its step on the whole" in text
            assert "says works_on_shards = True" in text
            assert differences(dict(model.state_dict()), before) == {}
            assert not ours.state


@pytest.mark.req("P-16")
@both_paths
@on_ranks(2)
def test_an_unknown_element_wise_optimizer_trains_as_plain(
    world: World, path: str
) -> None:
    """Nothing is said, counted or drawn at random by the trial."""
    for kind in BY_ELEMENT:
        model, plain = mixed(path), Mixed()
        ours, reference = kind(trainable(model)), kind(trainable(plain))
        optim.lr_scheduler.LinearLR(ours)
        optim.lr_scheduler.LinearLR(reference)
        ours.register_step_post_hook(lambda *_: None)
        drawn = torch.get_rng_state(), random.getstate()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_sharded(model, ours, world, range(3))
        assert torch.equal(drawn[0], torch.get_rng_state())
        assert drawn[1] == random.getstate()
        train_plain(plain, reference, world.world_size, range(3))

        apart = differences(dict(model.state_dict()), dict(plain.state_dict()))
        assert all(value <= 1e-6 for value in apart.values()), (kind, apart)
        assert ours.calls == 3


def check_unsure(world: World) -> list[str]:
    texts = []
    for kind in UNSURE:
        model = mixed("composable")
        backward(loss_of(model, INPUT(0, world.rank)))
        for again in range(2):
            ours = kind(trainable(model))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ours.step(lambda: 0.0)
            assert len(caught) == (0 if again else 1), (kind, caught)
            texts += [str(each.message) for each in caught]
    return texts


@pytest.mark.req("P-16")
def test_what_cannot_be_tried_is_warned_of_once(ranks: RankCount) -> None:
    """With the reason, and the way to say that it is element-wise."""
    for noisy, around, closing in ranks(2).run(check_unsure):
        assert "Noisy holds " in noisy
        assert "its step draws random numbers" in noisy
        assert "no attribute 'base'" in around
        assert "its step raised TypeError" in closing
        assert "works_on_shards = True" in closing


@on_ranks(2)
def test_whole_parameters_and_marked_classes_are_left_alone(world: World) -> None:
    """``works_on_shards`` stays the way to say so.

    Whole parameters, and classes that say so, are stepped without a trial.
    """

    class Marked(Orthogonal):
        works_on_shards = True

    whole = FullyShardedDataParallel(
        tiny_mlp(), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    for model, kind in ((whole, Orthogonal), (fully_shard(tiny_mlp()), Marked)):
        backward(model(torch.ones(2, 8)).sum())
        kind(trainable(model)).step()


def check_rows(world: World) -> str:
    model = fully_shard(tiny_mlp(), block=Block.ELEMENT)
    backward(model(torch.ones(2, 8)).sum())
    return message_of(RowCentred(trainable(model)).step)


def test_the_trial_is_cut_as_the_parameters_are(ranks: RankCount) -> None:
    """An optimizer that takes means of rows may step on rows, and not on elements."""
    for text in ranks(2).run(check_rows):
        assert "on the whole it steps, and on a part" in text or "apart" in text
