"""Claims on programs under an arena: numbers as without, never memory of another."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    Arena,
    MixedPrecision,
    ShardingStrategy,
    checkpoint,
    fully_shard,
    no_sync,
    reshard,
    set_reshard_after_backward,
    unshard,
    unshard_params,
)
from composable_fsdp.access.manual import reset_iter_state
from composable_fsdp.flat import residency
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.test_arena import addresses, both, by_arena
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, gpt_input, loss_of, sgd
from tests.support.sharded import message_of
from tests.support.tiny import TinyGPT
from tests.support.world import World

SHARED = Arena(poison=True, reduce=True)


def train(model: nn.Module, rank: int, steps: int = 3) -> Tensor:
    """The gradients after some steps, and the weights, as one vector."""
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        backward(loss_of(model, gpt_input(step, rank)))
        optimizer.step()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat(
        [each.detach().flatten() for each in (*grads, *model.parameters())]
    )


def checkpointed(model: TinyGPT, rank: int) -> None:
    """Forwards run again in backward."""
    for block in model.blocks:
        checkpoint(block)


def accumulated(model: TinyGPT, rank: int) -> None:
    """Gradients wait in the reduce buffers."""
    # The second backward copies gradients of all units, which then wait together.
    with no_sync(model):
        for step in (6, 7):
            backward(loss_of(model, gpt_input(step, rank)))
    backward(loss_of(model, gpt_input(8, rank)))


def frozen_and_unfrozen(model: TinyGPT, rank: int) -> None:
    """The units get other regions, and then the first ones again."""
    train(model, rank)
    model.blocks[0].requires_grad_(False)
    early = loss_of(model, gpt_input(2, rank))
    model.blocks[2].down.requires_grad_(False)
    late = loss_of(model, gpt_input(3, rank))
    backward(early)
    backward(late)
    model.requires_grad_(True)


def evaluated(model: TinyGPT, rank: int) -> None:
    """A forward that no backward follows."""
    with torch.inference_mode():
        model.eval()(gpt_input(3, rank))
    model.train()


def unsharded_by_hand(model: TinyGPT, rank: int) -> None:
    """Units are full before their turn, also such as share a slot with others."""
    for block in model.blocks:
        unshard(block)
        backward(loss_of(model, gpt_input(1, rank)))
    unshard(model.blocks[3], async_op=True)
    backward(loss_of(model, gpt_input(1, rank)))


def kept_full(model: TinyGPT, rank: int) -> None:
    """Units stay full behind their backward, until another needs the slot."""
    set_reshard_after_backward(model, False)
    for step in range(2):
        backward(loss_of(model, gpt_input(step, rank)))
    set_reshard_after_backward(model, True)
    backward(loss_of(model, gpt_input(2, rank)))


def shown(model: TinyGPT, rank: int) -> None:
    """All units are full at the same time, and are written to."""
    with unshard_params(model):
        for parameter in model.parameters():
            parameter.data.add_(0.125)


def recast(model: TinyGPT, rank: int) -> None:
    """Full parameters take more bytes than the slots have."""
    train(model, rank)
    model.double()
    backward(loss_of(model, gpt_input(1, rank)))
    model.zero_grad()
    model.float()


def raised(model: TinyGPT, rank: int) -> None:
    """A forward and a backward end half-way."""
    train(model, rank)
    for register in ("register_forward_pre_hook", "register_full_backward_pre_hook"):
        hook = getattr(model.blocks[2], register)(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(loss_of(model, gpt_input(0, rank)))
        hook.remove()
    model.zero_grad()


def twice(model: TinyGPT, rank: int) -> None:
    """Two graphs are alive, and one of them is kept."""
    first, second = (loss_of(model, gpt_input(step, rank)) for step in range(2))
    first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    backward(second)
    backward(first)


def copied(model: TinyGPT, rank: int) -> None:
    """A copy has slots of its own."""
    twin = copy.deepcopy(model)
    assert torch.equal(train(model, rank), train(twin, rank))
    if _get_fsdp_handles(model)[0].form.slot is not None:
        assert not set(addresses(twin)) & set(addresses(model))


PROGRAMS: Sequence[Callable[[TinyGPT, int], None]] = (
    checkpointed,
    accumulated,
    frozen_and_unfrozen,
    evaluated,
    unsharded_by_hand,
    kept_full,
    shown,
    recast,
    raised,
    twice,
    copied,
)
MODES: dict[str, dict[str, Any]] = {
    "own": {},
    "zero2": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "low": {"mixed_precision": MixedPrecision(torch.bfloat16)},
}


@pytest.mark.few(5)
@pytest.mark.req("M-07")
@by_arena
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@on_ranks(2)
def test_programs_get_the_numbers_of_without(
    world: World, arena: Arena, program: Callable[[TinyGPT, int], None], mode: str
) -> None:
    """Bit by bit, also in the training that follows."""
    results = []
    for model in both("composable", arena, **MODES[mode]):
        assert isinstance(model, TinyGPT)
        program(model, world.rank)
        # ``train`` clears the gradients of the program.
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results.append(torch.cat([*grads, train(model, world.rank)]))

    assert torch.equal(*results)
    assert not results[0].isnan().any()


class Ordered(nn.Module):
    """Linear layers, run in an order that may change; then other uses of them."""

    def __init__(self, number: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(number))
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.order = list(range(number))
        self.towers = 1

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers in order, in each tower those of its residue."""
        results = []
        for tower in range(self.towers):
            y = x
            for index in self.order:
                if index % self.towers == tower:
                    y = self.layers[index](y).relu() + y
            results.append(y)
        return torch.stack(results).sum(0)


def pair_of(arena: Arena, **options: Any) -> list[Ordered]:
    """The same model without and with an arena; each layer is a unit."""
    made = []
    for each in (None, arena):
        model = Ordered()
        for layer in model.layers:
            fully_shard(layer, arena=each, **options)
        made.append(fully_shard(model, arena=each, **options))
    return made


def steps_of(
    models: Sequence[Ordered], rank: int, change: Callable[[Ordered, int], None]
) -> Iterator[list[list[int]]]:
    """Run a step of the models, which must give equal gradients, per change."""
    seen = []
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        grads = []
        for model in models:
            change(model, step)
            backward(model(x).square().sum())
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        for ours, others in zip(*grads, strict=True):
            assert torch.equal(ours, others)
        seen.append(addresses(models[-1]))
        yield seen


@pytest.mark.req("M-07")
@by_arena
@pytest.mark.parametrize("mode", ["own", "zero2"])
@on_ranks(2)
def test_an_order_that_the_plan_does_not_know(
    world: World, arena: Arena, mode: str
) -> None:
    """The order changes from step to step, layers are left out, and run twice."""
    models = pair_of(arena, **MODES[mode])
    orders = [
        [0, 1, 2, 3, 4, 5],
        [5, 4, 3, 2, 1, 0],
        [0, 2, 4, 1, 3, 5],
        [1, 3, 5],
        [3, 3, 1, 3],
        [0, 1, 2, 3, 4, 5],
    ]

    def change(model: Ordered, step: int) -> None:
        model.order = orders[step]

    *_, seen = steps_of(models, world.rank, change)
    assert seen.count(seen[0]) == len(seen)


@pytest.mark.req("M-07")
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@on_ranks(2)
def test_units_whose_inputs_need_no_gradient_give_way(
    world: World, ahead: bool
) -> None:
    """The second tower begins with raw inputs, so no hook tells that it has ended."""
    models = pair_of(SHARED, forward_prefetch=ahead)

    def change(model: Ordered, step: int) -> None:
        model.towers = 1 + step % 3

    *_, seen = steps_of(models, world.rank, change)
    assert seen.count(seen[0]) == len(seen)


class Calling(nn.Module):
    """A layer that calls another, which is not below it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.others = (other,)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, call the other, multiply again."""
        x = x @ self.weight
        for other in self.others:
            x = other(x)
        return x @ self.weight


def calling(arena: Arena | None) -> nn.Sequential:
    """Layers 0 to 3, of which 2 calls 0."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    for linear in layers:
        nn.init.eye_(linear.weight)
    zero, one, _, three = layers
    model = nn.Sequential(zero, one, Calling(zero), three)
    for layer in model:
        fully_shard(layer, arena=arena)
    return fully_shard(model, arena=arena)


@pytest.mark.req("M-07")
@on_ranks(2)
def test_a_unit_that_was_not_used_before_moves_out(world: World) -> None:
    """Layer 2 calls layer 0 in its own forward, and both were to share a slot."""
    results = []
    for arena in (None, SHARED):
        model = calling(arena)
        for _ in range(3):
            x = torch.ones(2, 8) + world.rank
            backward(model[1:](x).sum())
        results.append([p.grad for p in model.parameters() if p.grad is not None])

    slots = [handle.form.slot for handle in _get_fsdp_handles(model)]
    assert slots[1] is not slots[3]
    assert all(map(torch.equal, *results))


@pytest.mark.req("M-07")
@on_ranks(2)
def test_two_units_in_use_in_one_slot_are_refused_by_name(world: World) -> None:
    """Both had their turn, so that graphs may have saved views of both."""
    model, apart = calling(SHARED), calling(Arena(shared=False))
    refused = message_of(lambda: model(torch.ones(2, 8)))
    backward(apart(torch.ones(2, 8)).sum())

    assert refused.startswith(
        "PhaseError: Fully sharded module '0' is needed while '2' is in use"
    )
    assert "arena=Arena(shared=False)" in refused


@pytest.mark.req("M-07")
@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_units_of_one_slot_are_not_shown_together_by_hand(
    world: World, late: bool
) -> None:
    """The second is refused, and comes after the first was resharded; also if the
    program has not waited for the first yet."""
    model = pair_of(SHARED)[1]
    layers = model.layers
    backward(model(torch.ones(2, 8)).sum())
    pending = [unshard(layer, async_op=late) for layer in layers[:2]]
    refused = message_of(lambda: unshard(layers[2]))
    for each in filter(None, pending):
        each.wait()
    assert "'layers.2' is needed while 'layers.0' is unsharded by hand" in refused
    assert "Call reshard on 'layers.0' before" in refused
    assert layers[0].weight.shape == (8, 8)
    reshard(layers[0])
    unshard(layers[2])

    assert layers[2].weight.shape == (8, 8)
    backward(model(torch.ones(2, 8)).sum())


@pytest.mark.req("M-07")
@pytest.mark.parametrize("poison", [False, True])
@on_ranks(2)
def test_a_stale_view_reads_nan_in_a_poisoned_slot(world: World, poison: bool) -> None:
    """A view that is kept past its unit's turn; integers get bits of ones."""
    model = Ordered()
    model.layers[2].register_buffer("steps", torch.zeros(()))
    model.layers[2].codes = nn.Parameter(torch.arange(6), requires_grad=False)
    kept: list[Tensor] = []
    model.layers[2].register_forward_hook(
        lambda layer, *_: kept.extend([layer.weight.data, layer.codes.data])
    )
    for layer in model.layers:
        fully_shard(layer, arena=Arena(poison=poison))
    fully_shard(model, arena=Arena(poison=poison))
    with torch.no_grad():
        model(torch.ones(1, 8))

    weight, codes = kept
    assert bool(weight.isnan().all()) == poison
    assert (codes.tolist() == [-1] * 6) == poison


def test_arenas_are_checked_where_they_are_given() -> None:
    """Types and values by the constructor, what a unit cannot have by the options."""
    assert "shared=...) expects True or False" in message_of(
        lambda: Arena(shared=cast(Any, 1))
    )
    assert "expects None or 'nccl'" in message_of(lambda: Arena(comm_memory="mpi"))


@pytest.mark.req("M-07")
@on_ranks(2)
def test_a_slot_that_is_left_is_not_read_by_graphs_of_before(world: World) -> None:
    """After a wait that raised, the units of the slot lie elsewhere, and train on."""
    models = pair_of(SHARED)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(world.rank))
    losses = [model(x).square().sum() for model in models]
    handles = _get_fsdp_handles(models[1])
    before = addresses(models[1])

    # The wait for an all-gather of layer 0 raises, as after a time-out.
    unshard(models[1].layers[0], async_op=True)
    ready = handles[1].ready
    assert ready is not None
    ready.wait()
    residency.leave_full(handles[1])
    handles[1].ready = None
    reshard(models[1].layers[0])

    assert "modified by an inplace operation" in message_of(losses[1].backward)
    reset_iter_state(models[1])
    for model in models:
        model.zero_grad()
        backward(model(x).square().sum())
    after = addresses(models[1])
    for index, handle in enumerate(handles[1:]):
        moved = after[2 * index] != before[2 * index]
        assert moved == (handle.form.slot is handles[1].form.slot)
    for ours, others in zip(*(m.parameters() for m in models), strict=True):
        assert ours.grad is None or torch.equal(ours.grad, others.grad)


@pytest.mark.req("M-07")
@on_ranks(2)
def test_the_memory_of_an_arena_ends_with_the_model(world: World) -> None:
    """Nothing but the units holds the slots."""
    model = pair_of(SHARED)[1]
    backward(model(torch.ones(2, 8)).sum())
    slots = [handle.form.slot for handle in _get_fsdp_handles(model)]
    held = [
        weakref.ref(s.memory) for s in slots if s is not None and s.memory is not None
    ]
    del model, slots
    gc.collect()

    assert [link() for link in held] == [None] * 6


@pytest.mark.req("M-07")
@by_arena
@on_ranks(2)
def test_second_derivatives_are_those_of_without(world: World, arena: Arena) -> None:
    """The graph of a backward reads parameters that shared slots do not hold together:
    the second backward gathers each unit again."""
    results = []
    for model in pair_of(arena):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(world.rank))
        x.requires_grad_()
        loss = model(x).tanh().square().sum()
        grads = torch.autograd.grad(loss, [x], create_graph=True)
        backward(torch.stack([g.square().sum() for g in grads]).sum())
        results.append([p.grad for p in model.parameters() if p.grad is not None])

    assert len(results[0]) == len(results[1]) > 0
    assert all(map(torch.equal, *results))
