"""``call_where``: units that only some ranks run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    get_full_grad,
)
from composable_fsdp.comm import collectives
from composable_fsdp.errors import CompositionError, DesyncError, PhaseError
from composable_fsdp.features import Arena, call_where
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.runtime import unshard
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.features.where import WIDTH, Program, check_program, plain_where
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.short_waits import shorten_waits
from tests.support.world import RankPool, World

HYBRID = ShardingStrategy.HYBRID_SHARD


@on_ranks(4)
def test_replicas_join_each_other(world: World) -> None:
    """Of two replicas of two ranks, one rank alone runs the tower."""
    check_program(world, Program(drops=(1, 8, 0, 6), strategy=HYBRID, kept="block"))


class Net(nn.Module):
    """A unit for some ranks before a layer for all."""

    def __init__(self, width: int = WIDTH, *, where: Any = call_where) -> None:
        super().__init__()
        self.where, self.seen = where, nn.Linear(width, width)
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, 1)
        self.result: Any = None

    def forward(self, x: Tensor, used: bool, how: str = "added") -> Tensor:
        x = torch.tanh(self.layer(x))
        if how == "plain":
            x = x + self.seen(x)
        self.result = self.where(self.seen, used, x)
        if how == "dropped":
            self.result = None
        elif how != "kept":
            x = x + self.result
        return cast(Tensor, self.head(torch.tanh(x)).square().mean())


def net(width: int = WIDTH, **options: Any) -> Any:
    """The sharded model: units ``seen``, ``layer`` and the root."""
    torch.manual_seed(0)
    model = Net(width)
    for each in (model.seen, model.layer, model):
        fully_shard(each, **options)
    return model


@on_ranks(2)
def test_ranks_send_the_same_and_nothing_for_a_unit_that_nobody_runs(
    world: World,
) -> None:
    """A byte per rank; else a gather in forward, a gather and a reduction in backward.
    The order of steps that differ is compared with no message."""
    model = net()
    x = torch.randn(2, WIDTH)
    sent = []
    for used in (False, True, world.rank == 0, False, world.rank == 1, True, False):
        with collectives.record() as calls:
            backward(model(x, used))
        sent.append([(call.op, call.numel) for call in calls])
        model.zero_grad()
    extra = len(sent[1]) - len(sent[-1])

    assert world.all_equal(sent)
    assert ("all_gather_byte", (2,)) in sent[-1]
    assert sent[3] == sent[6]
    assert sent[1] == sent[2] == sent[4] == sent[5]
    assert extra == 3


@on_ranks(2)
def test_evaluation_joins_the_gather_alone(world: World) -> None:
    """Without gradients: one byte and one gather, and a result without a graph."""
    model = net()
    with torch.no_grad(), collectives.record() as calls:
        loss = model(torch.randn(2, WIDTH), world.rank == 1)

    assert [c.op for c in calls].count("all_gather_byte") == 1
    assert not loss.requires_grad
    assert model.seen.weight.numel() < WIDTH * WIDTH


@on_ranks(2)
def test_a_weight_of_a_million_elements_in_mixed_precision(world: World) -> None:
    """Computed in bfloat16 on one rank; the other joins with zeros."""
    model = net(1024, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    torch.manual_seed(0)
    plain = Net(1024, where=plain_where)
    for rank in range(2):
        x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(rank))
        backward(plain(x, rank == 0) / 2)
        if rank == world.rank:
            backward(model(x, rank == 0))
    wanted: Any = plain.seen.weight.grad
    mine: Any = get_full_grad(model, "seen.weight")

    assert (mine - wanted).norm() < 0.02 * wanted.norm()


def leave_out(world: World, how: str, words: str) -> None:
    """Rank 1 leaves the result out of the loss."""
    shorten_waits()
    model = net(process_group=dist.new_group())
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        backward(model(x, world.rank == 0))
    loss = model(x, world.rank == 0, "added" if world.rank == 0 else how)
    with pytest.raises((PhaseError, DesyncError)) as error:
        backward(loss)

    assert "'seen'" in str(error.value)
    assert re.search(words, str(error.value))


LEFT_OUT = "call_where of 'seen' was left out of the loss on this rank"


@pytest.mark.req("W-06")
@pytest.mark.parametrize(
    ("how", "words"), [("dropped", LEFT_OUT), ("kept", "never meet")]
)
def test_a_result_left_out_of_the_loss_is_an_error_on_all_ranks(
    how: str, words: str
) -> None:
    """By name and soon, not at the time-out; the rank that added it learns why."""
    # Ranks and a group of their own: a collective is left unfinished.
    with RankPool(2, "gloo") as pool:
        pool.run(leave_out, how, words)


@on_ranks(2)
def test_an_error_leaves_nothing_behind(world: World) -> None:
    """Where the wait for one of several units fails; and the next step is right."""
    model = Net()
    model.seen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]
    for each in (*model.seen, model.seen, model.layer, model):  # type: ignore[misc]
        fully_shard(each)
    x = torch.randn(2, WIDTH)
    backward(model(x, True))
    handles = _get_fsdp_handles(model.seen)

    def fail(handle: FlatParamHandle) -> None:
        raise RuntimeError("the wait failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unshard, "wait_unsharded", fail)
        with pytest.raises(RuntimeError, match="the wait failed"):
            model(x, world.rank == 0)

    assert not any(handle.kept_for_backward for handle in handles)
    backward(model(x, world.rank == 0))


def _create_graph(model: Any, x: Tensor) -> None:
    torch.autograd.backward(model(x, True), create_graph=True)


def _outside(model: Any, x: Tensor) -> None:
    model(x, True)
    call_where(model.seen, True, x)


def _no_unit(model: Any, x: Tensor) -> None:
    call_where(model.head, True, x)


def _reentrant(model: Any, x: Tensor) -> None:
    model.where = lambda *a: checkpoint(call_where, *a, use_reentrant=True)
    backward(model(x, True))


def _no_tensor(model: Any, x: Tensor) -> None:
    model.seen.register_forward_hook(lambda *_: 1.0)
    model(x, True)


def _arena(model: Any, x: Tensor) -> None:
    other = Net()
    other.seen = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))  # type: ignore[assignment]
    for each in (*other.seen, other.seen, other.layer, other):  # type: ignore[misc]
        fully_shard(each, arena=Arena())
    other(x, True)


MISUSES: dict[str, tuple[Callable[[Any, Tensor], None], str]] = {
    "outside": (_outside, "in the forward of a unit above it"),
    "no unit": (_no_unit, "call_where expects a fully sharded module, got a Linear"),
    "plain": (lambda m, x: m(x, True, "plain"), "by call_where alone"),
    "create_graph": (_create_graph, "without create_graph or inputs"),
    "reentrant": (_reentrant, "use_reentrant=False"),
    "no tensor": (_no_tensor, "returned no tensor"),
    "arena": (_arena, "would prefetch other units, or share Arena slots"),
}


@pytest.mark.parametrize("name", MISUSES)
@on_ranks(2)
def test_a_misuse_is_refused_by_name_and_the_next_step_is_right(
    world: World, name: str
) -> None:
    """The error says what to do; afterwards the model trains on."""
    call, words = MISUSES[name]
    model = net()
    x = torch.randn(2, WIDTH)
    with pytest.raises((CompositionError, PhaseError), match=words):
        call(model, x)
    if name != "no tensor":
        model.where = call_where
        model.zero_grad()
        backward(model(x, world.rank == 0))

        assert model.seen.weight.grad is not None
