"""Communication per step is what the plan says, byte for byte, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CustomPolicy,
    ShardingStrategy,
    fully_shard,
    get_full_grad,
    plan,
)
from composable_fsdp.comm.call_records import CallRecord
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.planning.plan import ShardingPlan
from tests.runtime.traffic import Counts, counts, planned
from tests.support.models import TinyGPT, module_at
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def gpt_plan(world_size: int, strategy: ShardingStrategy) -> ShardingPlan:
    """The plan of a ``TinyGPT`` with a unit per block."""
    model = TinyGPT()
    chosen = [module_at(model, unit) for unit in gpt_units(model)]
    policy = CustomPolicy(lambda module: any(module is each for each in chosen))
    return plan(model, world_size=world_size, policy=policy, strategy=strategy)


def steps_of(
    model: nn.Module, rank: int, steps: int = 3
) -> list[tuple[list[CallRecord], list[CallRecord], list[CallRecord]]]:
    """Calls of forward, backward and the rest, for each of ``steps`` steps."""
    optimizer = sgd(model.parameters())
    seen = []
    for step in range(steps):
        with record_steps() as in_forward:
            loss = loss_of(model, gpt_input(step, rank))
        with record_steps() as in_backward:
            backward(loss)
        with record_steps() as rest:
            optimizer.step()
            optimizer.zero_grad()
        seen.append((in_forward, in_backward, rest))
    return seen


def count_steps(
    world: World, path: str, strategy: ShardingStrategy
) -> list[tuple[Counts, Counts, Counts]]:
    """Counts of three steps of a small GPT."""
    model = TinyGPT()
    sharded = apply_units(model, gpt_units(model), path=path, strategy=strategy)
    steps = steps_of(sharded, world.rank)
    return [(counts(f), counts(b), counts(r)) for f, b, r in steps]


def total(step: tuple[Counts, Counts, Counts]) -> Counts:
    """The three parts of a step together."""
    kinds = dict.fromkeys(op for part in step for op in part)
    return {
        op: (
            sum(part[op][0] for part in step if op in part),
            sum(part[op][1] for part in step if op in part),
        )
        for op in kinds
    }


@pytest.mark.req("B-19")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_step_sends_what_the_plan_says(
    ranks: RankCount, world_size: int, strategy: ShardingStrategy, path: str
) -> None:
    """Calls and bytes of every step, the first included, equal ``plan.traffic``."""
    expected = planned(gpt_plan(world_size, strategy))

    for steps in ranks(world_size).run(count_steps, path, strategy):
        assert [total(step) for step in steps] == [expected] * 3


@pytest.mark.req("B-19", "S1-33")
@pytest.mark.parametrize("path", PATHS)
def test_a_unit_is_gathered_once_per_pass_and_reduced_once(
    ranks: RankCount, path: str
) -> None:
    """Root and two blocks: three gathers, two more, three reductions, nothing."""
    steps = ranks(2).run(count_steps, path, ShardingStrategy.FULL_SHARD)[0]

    for first, second, rest in steps:
        assert {op: n for op, (n, _) in first.items()} == {"all_gather": 3}
        assert {op: n for op, (n, _) in second.items()} == {
            "all_gather": 2,
            "reduce_scatter": 3,
        }
        assert rest == {}


@pytest.mark.req("B-19")
@pytest.mark.parametrize("path", PATHS)
def test_weights_kept_after_forward_are_not_gathered_again(
    ranks: RankCount, path: str
) -> None:
    """SHARD_GRAD_OP gathers in forward only."""
    steps = ranks(2).run(count_steps, path, ShardingStrategy.SHARD_GRAD_OP)[1]

    for first, second, _ in steps:
        assert first["all_gather"][0] == 3
        assert list(second) == ["reduce_scatter"]


@pytest.mark.req("B-19")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_one_rank_sends_nothing(
    ranks: RankCount, strategy: ShardingStrategy, path: str
) -> None:
    """At world size 1 no collective is left, and the plan says so."""
    (steps,) = ranks(1).run(count_steps, path, strategy)

    assert steps == [({}, {}, {})] * 3
    assert planned(gpt_plan(1, strategy)) == {}


class Adapter(nn.Module):
    """A frozen matrix of 16 x 16 with a trainable low-rank term beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 16)`` to the same."""
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def reduce_adapter(world: World) -> tuple[Counts, int, int]:
    """One step of a unit that is mostly frozen: calls, and who has gradients."""
    model = fully_shard(Adapter())
    x = torch.ones(2, 16) * (world.rank + 1)
    with record_steps() as calls:
        backward(loss_of(model, x))
    state = fully_shard.state(model)
    assert state is not None
    frozen = [r for r in state.handle.layout.regions if not r.layout.trainable]
    buffers = [
        r
        for r in frozen
        if isinstance(r, TrainableRegion) or r.gradient.shard is not None
    ]
    names = [name for name, _ in model.named_parameters()]
    with_grad = [n for n in names if get_full_grad(model, n) is not None]
    return counts(calls), len(buffers), len(with_grad)


@pytest.mark.req("D-09")
def test_only_trainable_elements_are_reduced(ranks: RankCount) -> None:
    """64 trainable float32 elements are 256 bytes; the 256 frozen ones cost none."""
    for sent, buffers, with_grad in ranks(2).run(reduce_adapter):
        assert sent["reduce_scatter"] == (1, 256)
        assert buffers == 0
        assert with_grad == 2


class FrozenMiddle(nn.Module):
    """Two trainable layers with a frozen one between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 8)`` to the same."""
        y: Tensor = self.last(self.frozen(self.first(x)))
        return y


def run_frozen_middle(world: World) -> tuple[Counts, bool]:
    """Counts of one step with a frozen unit on the way of the gradient."""
    torch.manual_seed(0)
    model = apply_units(FrozenMiddle(), ["first", "frozen", "last"])
    with record_steps() as calls:
        backward(loss_of(model, torch.ones(2, 8)))
    return counts(calls), all(
        (p.grad is None) == (not p.numel())
        for p in model.parameters()
        if p.requires_grad
    )


@pytest.mark.req("B-19")
def test_a_frozen_unit_on_the_way_of_the_gradient_costs_what_the_plan_says(
    ranks: RankCount,
) -> None:
    """Its weights are needed again for its input's gradient; it reduces nothing."""
    model = FrozenMiddle()
    policy = CustomPolicy(lambda module: isinstance(module, nn.Linear))
    expected = planned(plan(model, world_size=2, policy=policy))

    for sent, complete in ranks(2).run(run_frozen_middle):
        assert complete
        assert sent == expected
