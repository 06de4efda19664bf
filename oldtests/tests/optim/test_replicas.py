"""Claims on replicas: their average, and the state that a replica takes over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import fully_shard, get_full_grad
from composable_fsdp.errors import CheckpointError
from composable_fsdp.features import (
    ReplicaState,
    load_replica_state_dict,
    register_comm_hook,
    replica_hook,
    replica_state_dict,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import adamw, backward, gpt_input, loss_of
from tests.support.sharded import gpt, message_of
from tests.support.tiny import tiny_mlp
from tests.support.world import World


class Manager:
    """Averages with another replica, whose gradients are three times ours."""

    def __init__(self) -> None:
        self.waited = 0

    def allreduce(self, tensor: Tensor) -> Any:
        tensor.add_(3 * tensor).div_(2)
        return self

    def wait(self) -> bool:
        self.waited += 1
        return True


def group() -> Any:
    return torch.distributed.group.WORLD


@pytest.mark.req("M-08")
@on_ranks(1, 3)
def test_gradients_are_averaged_over_ranks_and_then_by_the_manager(
    world: World,
) -> None:
    """Once per unit; on a single rank by the manager alone."""
    exact, model = gpt("composable"), gpt("composable")
    manager = Manager()
    register_comm_hook(model, ReplicaState(group(), manager), replica_hook)
    for each in (exact, model):
        backward(loss_of(each, gpt_input(0, world.rank)))

    for name, _ in model.named_parameters():
        ours, theirs = get_full_grad(model, name), get_full_grad(exact, name)
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, 2 * theirs)
    assert manager.waited == 3


def train(world: World, model: nn.Module, optim: Any, steps: range) -> None:
    for step in steps:
        backward(loss_of(model, gpt_input(step, world.rank)))
        optim.step()
        optim.zero_grad()


@pytest.mark.req("M-08")
@on_ranks(3)
def test_a_replica_goes_on_where_the_other_is(world: World) -> None:
    """Bit by bit, also if it has run no step; tensors are copied, and stay objects."""
    first, second = gpt("wrapper"), gpt("wrapper", seed=5)
    theirs, ours = adamw(first.parameters()), adamw(second.parameters())
    train(world, first, theirs, range(2))
    kept = [p.data_ptr() for p in second.parameters()]

    load_replica_state_dict(second, ours, replica_state_dict(first, theirs))

    assert [p.data_ptr() for p in second.parameters()] == kept
    train(world, first, theirs, range(2, 4))
    train(world, second, ours, range(2, 4))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        found, expected = ours.state.get(q, {}), theirs.state.get(p, {})
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value)
            assert not value.numel() or found[key].data_ptr() != value.data_ptr()


@pytest.mark.req("M-08")
@on_ranks(2)
def test_another_thread_reads_the_state_while_a_forward_runs(world: World) -> None:
    """Shards, although the modules show full parameters at that time."""
    model: Any = gpt("composable")
    optim = adamw(model.parameters())
    train(world, model, optim, range(1))
    before = replica_state_dict(model, optim)
    read: list[dict[str, Any]] = []

    def reads(*_: object) -> None:
        get = threading.Thread(
            target=lambda: read.append(replica_state_dict(model, optim))
        )
        get.start()
        get.join()

    model.blocks[1].down.register_forward_pre_hook(reads)
    backward(loss_of(model, gpt_input(1, world.rank)))

    assert len(read) == 1
    assert list(read[0]["tensors"]) == list(before["tensors"])
    for name, value in read[0]["tensors"].items():
        assert torch.equal(value, before["tensors"][name]), name


@on_ranks(1)
def test_replicas_that_differ_are_refused_and_nothing_changes(world: World) -> None:
    """With the name and both forms; and optimizers with both counts."""
    model = fully_shard(tiny_mlp())
    optim = adamw(model.parameters())
    wide = fully_shard(tiny_mlp(hidden=16))
    before = [p.clone() for p in model.parameters()]

    given = replica_state_dict(wide, adamw(wide.parameters()))
    text = message_of(lambda: load_replica_state_dict(model, optim, given))
    assert text.startswith("CheckpointError: load_replica_state_dict got (16, 8)")
    assert "'0.weight (unit 0, parameter 0)' of this rank; this replica has" in text
    fewer = adamw(list(model.parameters())[:1])
    with pytest.raises(CheckpointError, match="of 1 groups and 1 parameters; this"):
        load_replica_state_dict(model, optim, replica_state_dict(model, fewer))
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_a_manager_without_allreduce_is_refused(one_rank: World) -> None:
    """With its class."""
    wrong: Any = object()
    with pytest.raises(TypeError, match=r"method allreduce, such as .* got a object"):
        ReplicaState(group(), wrong)
