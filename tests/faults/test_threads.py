"""A second thread that uses a model while a first is inside is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp import fully_shard, get_full_param, unshard, unshard_params
from composable_fsdp.comm.groups import operation_log
from tests.support.on_ranks import on_ranks
from tests.support.sharded import message_of
from tests.support.world import World, single_rank_group


class Waits(nn.Module):
    """Stops in forward or backward until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.where = ""
        self.inside, self.go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.inside.set()
        assert self.go_on.wait(20)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.stop()
        x = self.linear(x)
        if self.where == "backward":
            x.register_hook(lambda _: self.stop())  # type: ignore[no-untyped-call]
        return x


class Model(nn.Module):
    """Two units below a root; the first can stop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Waits(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def shown(model: Model) -> None:
    with unshard_params(model):
        pass


X = torch.ones(2, 4)
CALLS: dict[str, Callable[[Model], Any]] = {
    "forward": lambda model: model(X),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(Model().state_dict()),
    "unshard_params": shown,
    "unshard": lambda model: unshard(model.second),
    "get_full_param": lambda model: get_full_param(model, "second.weight"),
}


def sharded() -> Model:
    model = Model()
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    return model


@pytest.mark.req("X-33")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", CALLS)
def test_a_second_thread_inside_is_refused_and_the_first_goes_on(
    call: str, where: str
) -> None:
    """Both threads are named, and the first gets the gradients of one that is alone."""
    with single_rank_group():
        expected, model = sharded(), sharded()
        for each in (expected, model):
            each(X).sum().backward()
            each.zero_grad()
        expected(X).sum().backward()
        model.first.where = where
        first = threading.Thread(
            target=lambda: model(X).sum().backward(), name="first", daemon=True
        )
        first.start()
        assert model.first.inside.wait(20)
        model.first.where = ""
        text = message_of(lambda: CALLS[call](model))
        model.first.go_on.set()
        first.join(20)

        assert not first.is_alive()
        assert text.startswith("PhaseError: Thread 'MainThread' uses model Model"), text
        assert f"whose {where} runs in another thread" in text
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.req("X-33")
def test_threads_that_take_turns_share_a_model() -> None:
    """A forward in one, its backward in another; a backward inside a backward, too."""
    with single_rank_group():
        model, losses = sharded(), list[Tensor]()
        for _ in range(3):
            for work in (
                lambda: losses.append(model(X).sum()),
                lambda: losses.pop().backward(),  # type: ignore[no-untyped-call]
            ):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join(20)
            assert model.second.weight.grad is not None
            model.zero_grad()
        other, outputs = nn.Linear(4, 4), model(X)

        def inner(_: Tensor) -> None:
            with torch.enable_grad():
                other(X).sum().backward()

        outputs.register_hook(inner)
        outputs.sum().backward()
        assert other.weight.grad is not None


@pytest.mark.req("X-33")
@on_ranks(2)
def test_a_model_over_groups_of_its_own_leaves_the_default_group_to_others(
    world: World,
) -> None:
    """Its ranks are compared over its own group: another thread may send meanwhile."""
    group, model = dist.new_group(), fully_shard(nn.Linear(4, 4))
    model(X).sum().backward()
    everyone = dist.group.WORLD
    assert everyone is not None
    before = operation_log(everyone).number

    def train() -> None:
        own = fully_shard(nn.Linear(4, 4), process_group=group)
        own(X).sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(20)
    assert operation_log(group).number >= 3  # a comparison, a gather and a reduction
    assert operation_log(everyone).number == before
