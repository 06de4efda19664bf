"""Parameters that are frozen or unfrozen after sharding, or used by some ranks only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    ShardingStrategy,
    fully_shard,
)
from composable_fsdp.access import set_reduce_scatter_unused_params
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import PhaseError, PlanError
from composable_fsdp.phases import Residency
from composable_fsdp.tools.memory import traffic_of
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    adamw,
    apply_units,
    averaged_gradients,
    backward,
    differences,
    gpt_input,
    gpt_units,
    loss_of,
    tolerance_at,
    wide_input,
)
from tests.support.sharded import (
    both_paths,
    gpt,
    own_gradient,
    own_parts,
)
from tests.support.world import World

Frozen = Callable[[str], bool]
# Per step, which parameters are frozen: parts of units, whole units, all but one, none.
SCHEDULE: list[Frozen] = [
    lambda name: "bias" in name,
    lambda name: "blocks.0" in name,
    lambda name: "qkv" in name or "tokens" in name,
    lambda name: name != "blocks.1.up.weight",
    lambda name: False,
    lambda name: "bias" in name,
]


def set_frozen(model: nn.Module, frozen: Frozen) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(name))


@pytest.mark.few(4)
@pytest.mark.req("U-01", "S2-11", "D-09")
@pytest.mark.parametrize("offload", [False, True])
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(1, 2, 3)
def test_freezing_and_unfreezing_trains_as_the_plain_model(
    world: World, path: str, strategy: ShardingStrategy, offload: bool
) -> None:
    """With AdamW's state kept, bit by bit at one and two ranks; a backward reduces the
    bytes that the plan tells of what is trained. Evaluations come between."""
    model = TinyGPT()
    set_frozen(model, SCHEDULE[0])
    plain = copy.deepcopy(model)
    option = CPUOffload(offload_params=offload)
    sharded = apply_units(
        model, gpt_units(model), path=path, strategy=strategy, cpu_offload=option
    )
    ours, theirs = adamw(sharded.parameters()), adamw(plain.parameters())
    objects = list(map(id, sharded.parameters()))
    tolerance = tolerance_at(world.world_size)
    for at, frozen in enumerate(SCHEDULE):
        set_frozen(sharded, frozen)
        set_frozen(plain, frozen)
        inputs = [gpt_input(at, rank) for rank in range(world.world_size)]
        expected = averaged_gradients(plain, inputs)
        if at % 2:
            with torch.inference_mode():
                sharded(inputs[0])
        loss = loss_of(sharded, inputs[world.rank])
        with record() as calls:
            backward(loss)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()

        plans = [s.handle.layout.plan for s in _get_fsdp_states(sharded)]
        traffic = [traffic_of(p, is_root=False, in_backward=True) for p in plans]
        reduced = sum(c.nbytes for c in calls if c.op == "reduce_scatter")
        assert reduced == sum(t.reduce_scatter_bytes for t in traffic)
        assert abs(loss.item() - expected[world.rank]) <= tolerance
        found = differences(sharded.state_dict(), plain.state_dict())
        assert all(value <= tolerance for value in found.values()), (at, found)
    assert list(map(id, sharded.parameters())) == objects


@on_ranks(2)
def test_a_cast_between_forward_and_backward_is_refused(world: World) -> None:
    """By the backward, which names the unit."""
    model, x = gpt("composable"), gpt_input(0, world.rank)
    old = loss_of(model, x)
    model.double()
    loss_of(model, x)

    with pytest.raises(PhaseError, match=r"unit .* through a forward that ran"):
        backward(old)


# ---- ranks that train different parts of the model ----

WIDTH = 4


class Experts(nn.Module):
    """A stem, and experts on it that all run; which ones count, the caller says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.stem = nn.Linear(WIDTH, WIDTH)
        linears = [nn.Linear(WIDTH, size) for size in (3, 3, WIDTH, 3)]
        pair = nn.Sequential(*linears[2:])
        self.experts = nn.ModuleList([*linears[:2], pair])
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
UNITS = ("stem", "experts.0", "experts.1", "experts.2.0", "experts.2")


batch = wide_input(WIDTH)


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


@pytest.mark.few(4)
@pytest.mark.req("B-17")
@pytest.mark.parametrize("second", [None, *CHOICES])
@pytest.mark.parametrize("prefetch", [None, *BackwardPrefetch])
@pytest.mark.parametrize("first", CHOICES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(3)
def test_units_without_a_gradient_take_part_with_zeros(
    world: World,
    first: str,
    second: str | None,
    strategy: ShardingStrategy,
    prefetch: BackwardPrefetch | None,
) -> None:
    """Ranks send the same in the same order, and all get the average; of two forwards
    of one backward the younger ends on every rank before the older one begins."""
    model, plain = shard(strategy, prefetch)
    for _ in range(2):
        model.zero_grad()
        wanted = averages(plain, CHOICES[first], 3, [0])
        loss = model(batch(0, world.rank), CHOICES[first][world.rank])
        if second is not None:
            more = averages(plain, CHOICES[second], 3, [1])
            wanted = {name: value + more[name] for name, value in wanted.items()}
            loss = loss + model(batch(1, world.rank), CHOICES[second][world.rank])
        with record() as calls:
            backward(loss)

        for name, (leaf, part) in own_parts(model, wanted).items():
            torch.testing.assert_close(own_gradient(leaf), part, msg=name)
        assert world.all_equal([(c.op, c.numel) for c in calls])
    for state in _get_fsdp_states(model):
        assert state.handle.residency is Residency.SHARDED
        assert not state.handle.reduction.due


@pytest.mark.req("B-07")
@on_ranks(2)
def test_a_cast_of_frozen_parameters_alone_is_refused_by_name(world: World) -> None:
    """Frozen and trainable ones share a region again when they are unfrozen."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0].requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    model[0].bfloat16()

    with pytest.raises(PlanError, match=r"'1\.weight'.*float32.*one dtype"):
        model(torch.ones(1, 4, dtype=torch.bfloat16))
    model[1].bfloat16()
    model[0].requires_grad_(True)
    out = model(torch.ones(1, 4, dtype=torch.bfloat16))

    out.sum().backward()
    held = [p for p in model.parameters() if p.numel()]
    assert {p.grad_dtype for p in held} == {p.dtype for p in held} == {torch.bfloat16}
    assert all(p.grad is not None for p in held)
