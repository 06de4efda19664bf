"""Claims on ranks that train different parts of the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    BackwardPrefetch,
    ShardingStrategy,
    fully_shard,
    get_full_grad,
    no_sync,
    set_reduce_scatter_unused_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import PhaseError
from composable_fsdp.phases import Residency
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import RankCount, own_gradient, own_parts
from tests.support.world import World

WIDTH = 4


class Pair(nn.Module):
    """Two layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


class Experts(nn.Module):
    """A stem, and experts on it that all run; which ones count, the caller says.

    Expert 1 runs twice, expert 2 holds units of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), Pair()])
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = self.stem(x).tanh()
        outputs = [expert(x) for expert in self.experts]
        outputs.append(self.experts[1](x * 2))
        total = x.sum()
        for i in chosen:
            total = total + (outputs[i] * self.gain).square().sum()
        return total


CHOICES: dict[str, list[list[int]]] = {
    "some": [[0], [2], [0, 1]],
    "none on one": [[], [0, 1, 2, 3], [3]],
    "once of twice": [[1], [3], [2]],
    "none": [[], [], []],
    "all": [[0, 1, 2, 3]] * 3,
}
UNITS = ("stem", "experts.0", "experts.1", "experts.2.first", "experts.2")


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(
        2, WIDTH, generator=torch.Generator().manual_seed(step * 9 + rank)
    )


def averages(
    plain: nn.Module, choices: list[list[int]], ranks: int, steps: Sequence[int]
) -> dict[str, Tensor]:
    """The mean over ranks of the sum over steps, zeros where nothing arrived."""
    plain.zero_grad()
    for rank in range(ranks):
        for step in steps:
            backward(plain(batch(step, rank), choices[rank]))
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad / ranks
        for name, p in plain.named_parameters()
    }


def assert_filled(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, (leaf, part) in own_parts(model, expected).items():
        torch.testing.assert_close(own_gradient(leaf), part, msg=name)


def shard(
    strategy: ShardingStrategy, prefetch: BackwardPrefetch | None
) -> tuple[Experts, Experts]:
    model = Experts()
    plain = copy.deepcopy(model)
    for unit in (*UNITS, ""):
        module = model.get_submodule(unit)
        fully_shard(module, strategy=strategy, backward_prefetch=prefetch)
    set_reduce_scatter_unused_params(model, True)
    return model, plain


def check_filled(
    world: World,
    choices: list[list[int]],
    strategy: ShardingStrategy,
    prefetch: BackwardPrefetch | None,
) -> None:
    model, plain = shard(strategy, prefetch)
    chosen = choices[world.rank]

    for step in range(2):
        model.zero_grad()
        loss = model(batch(step, world.rank), chosen)
        with record() as calls:
            backward(loss)

        expected = averages(plain, choices, world.world_size, [step])
        assert_filled(model, expected)
        assert world.all_equal([(c.op, c.numel) for c in calls])
    states = _get_fsdp_states(model)
    assert not any(s.handle.residency is not Residency.SHARDED for s in states)
    assert not any(s.handle.reduction.due for s in states)


@pytest.mark.req("B-17")
@pytest.mark.parametrize("prefetch", [None, *BackwardPrefetch])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_units_without_a_gradient_take_part_with_zeros(
    ranks: RankCount, choice: str, strategy: str, prefetch: BackwardPrefetch | None
) -> None:
    """Ranks send the same in the same order, and all get the average."""
    ranks(3).run(check_filled, CHOICES[choice], ShardingStrategy[strategy], prefetch)


@on_ranks(3)
def test_zeros_join_what_was_accumulated(world: World) -> None:
    """After a micro-batch under ``no_sync``."""
    choices = CHOICES["some"]
    model, plain = shard(ShardingStrategy.FULL_SHARD, None)

    with no_sync(model):
        backward(model(batch(0, world.rank), choices[world.rank]))
    backward(model(batch(1, world.rank), choices[world.rank]))

    assert_filled(model, averages(plain, choices, world.world_size, [0, 1]))


@on_ranks(3)
def test_a_retained_graph_is_filled_each_time(world: World) -> None:
    """Two backwards of one forward."""
    choices = CHOICES["some"]
    model, plain = shard(ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE)

    loss = model(batch(0, world.rank), choices[world.rank])
    loss.backward(retain_graph=True)
    loss.backward()

    assert_filled(model, averages(plain, choices, world.world_size, [0, 0]))


def check_joint(
    world: World, first: str, second: str, strategy: ShardingStrategy
) -> None:
    """One backward through two forwards that reach different parts on each rank."""
    one, two = CHOICES[first], CHOICES[second]
    model, plain = shard(strategy, BackwardPrefetch.BACKWARD_PRE)

    for _ in range(2):
        model.zero_grad()
        loss = model(batch(0, world.rank), one[world.rank])
        loss = loss + model(batch(1, world.rank), two[world.rank])
        with record() as calls:
            backward(loss)

        once = averages(plain, one, world.world_size, [0])
        again = averages(plain, two, world.world_size, [1])
        assert_filled(model, {name: once[name] + again[name] for name in once})
        assert world.all_equal([(c.op, c.numel) for c in calls])
    assert not any(
        s.handle.residency is not Residency.SHARDED for s in _get_fsdp_states(model)
    )


@pytest.mark.req("B-17")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("second", ["some", "none on one", "none"])
@pytest.mark.parametrize("first", ["some", "none on one"])
def test_forwards_of_one_backward_are_filled_one_after_the_other(
    ranks: RankCount, first: str, second: str, strategy: str
) -> None:
    """The younger one ends on every rank before the older one begins."""
    ranks(3).run(check_joint, first, second, ShardingStrategy[strategy])


def check_inside_a_unit(world: World, choices: list[int], ask: bool) -> list[bool]:
    model = Experts()
    fully_shard(model)
    set_reduce_scatter_unused_params(model, ask)

    backward(model(batch(0, world.rank), [choices[world.rank]]))

    names = [name for name, _ in model.named_parameters()]
    return [get_full_grad(model, name) is not None for name in names]


@pytest.mark.req("B-17")
def test_without_asking_the_gradient_stays_none_where_nothing_arrived(
    ranks: RankCount,
) -> None:
    """Inside one unit sizes agree anyway; who gets a ``.grad`` is the question.

    Without asking, ranks that disagree on it are told so (``test_agreement``).
    """
    alike = ranks(2).run(check_inside_a_unit, [0, 0], False)
    filled = ranks(2).run(check_inside_a_unit, [0, 1], True)

    # Those of the stem and the first expert, and the one of the model itself.
    assert alike[0] == alike[1]
    assert sum(alike[0]) == 5
    assert filled == [[True] * len(alike[0])] * 2


@pytest.mark.req("B-17")
@on_ranks(1, 2)
def test_units_that_no_rank_uses_cost_nothing_and_leave_nothing(world: World) -> None:
    """They are sharded at the end of backward, and ``.grad`` stays None."""
    model = Experts()
    plain = copy.deepcopy(model)
    for unit in (*UNITS, ""):
        fully_shard(model.get_submodule(unit))

    for step in range(2):
        backward(model(batch(step, world.rank), [0]))

    expected = averages(plain, [[0]] * world.world_size, world.world_size, [0, 1])
    for name, (leaf, part) in own_parts(model, expected).items():
        unused = name.startswith(("experts.1", "experts.2"))
        assert (leaf.grad is None) == (unused or not leaf.numel()), name
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, part, msg=name)
    states = _get_fsdp_states(model)
    assert not any(s.handle.residency is not Residency.SHARDED for s in states)


def break_backward(module: nn.Module, args: object, output: Tensor) -> None:
    """Have the gradient of the output raise."""

    def fail(_: Tensor) -> None:
        raise KeyError("in backward")

    output.register_hook(fail)  # type: ignore[no-untyped-call]


@on_ranks(3)
def test_after_a_raise_the_next_backward_is_filled(world: World) -> None:
    """All ranks raise at one place, and nothing of that backward is left."""
    model, plain = shard(ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE)
    everything = CHOICES["all"]

    broken = model.stem.register_forward_hook(break_backward)
    with pytest.raises(KeyError):
        backward(model(batch(0, world.rank), everything[world.rank]))
    broken.remove()
    model.zero_grad()
    choices = CHOICES["some"]
    backward(model(batch(1, world.rank), choices[world.rank]))

    assert_filled(model, averages(plain, choices, world.world_size, [1]))


@on_ranks(2)
def test_a_gradient_of_inputs_alone_gives_parameters_none(world: World) -> None:
    """``autograd.grad(loss, x)`` reduces nothing, and the next backward is filled."""
    torch.manual_seed(0)
    model = Experts()
    plain = copy.deepcopy(model)
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    set_reduce_scatter_unused_params(model, True)
    chosen = [world.rank]  # not the same on all ranks
    for keep in (False, True, False):
        x = torch.full((2, WIDTH), 0.5, requires_grad=True)
        loss = model(x, chosen)
        with record() as calls:
            (ours,) = torch.autograd.grad(loss, x, retain_graph=keep)
        assert all(p.grad is None for p in model.parameters())
        assert {call.op for call in calls} <= {"all_gather"}
        (theirs,) = torch.autograd.grad(plain(x, chosen), x)
        assert torch.allclose(ours, theirs, atol=1e-6)
        assert world.all_equal([call.op for call in calls])
        if keep:
            backward(loss)
            assert all((p.grad is None) == (not p.numel()) for p in model.parameters())
            model.zero_grad()


def test_a_gradient_of_some_parameters_is_refused(one_rank: World) -> None:
    """The others would get zeros that nobody asked for."""
    model = fully_shard(Pair())
    set_reduce_scatter_unused_params(model, True)
    loss = model(torch.ones(2, WIDTH)).sum()

    with pytest.raises(
        PhaseError, match=r"'first.weight' by inputs=.*turn the setting off"
    ):
        loss.backward(inputs=[model.first.weight])
