"""``unshard``, ``reshard`` and ``is_sharded``: one unit by hand, at any moment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from composable_fsdp import (
    CompositionError,
    PhaseError,
    ShardingStrategy,
    fully_shard,
    is_sharded,
    reshard,
    set_reshard_after_backward,
    set_reshard_after_forward,
    unshard,
    unshard_params,
)
from composable_fsdp.access.manual import UnshardHandle
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests.live import examples
from tests.runtime.events import units_of, watched
from tests.support.models import TinyGPT, module_at, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    apply_units,
    assert_same_training,
    averaged_gradients,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
    train,
    train_reference,
)
from tests.support.sharded import own_gradient
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def sharded_gpt(path: str, **options: Any) -> nn.Module:
    """A small GPT with a unit per block."""
    model = TinyGPT()
    return apply_units(model, gpt_units(model), path=path, **options)


def sizes(module: nn.Module) -> int:
    """Elements of the parameters that the module shows."""
    return sum(p.numel() for p in module.parameters())


@pytest.mark.req("B-09")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_unit_can_be_made_full_before_the_first_forward(
    world: World, path: str
) -> None:
    """It shows the plain values, is not gathered again, and reshards after forward.

    Unshard, look, unshard again, run, look.
    """
    plain = TinyGPT()
    model = sharded_gpt(path)
    block = module_at(model, "blocks.0")
    own = module_at(plain, "blocks.0")
    x = gpt_input(0, world.rank)

    with record_steps() as calls:
        assert unshard(block) is None
        assert unshard(block) is None
    assert len(calls) == 1
    assert not is_sharded(block)
    assert is_sharded(model)
    for mine, theirs in zip(block.parameters(), own.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    with watched() as events, torch.no_grad():
        y = model(x)
    assert torch.equal(y, plain(x))
    assert units_of(events, "gather") == ["", "blocks.1"]
    assert is_sharded(block)
    assert sizes(block) < sizes(own)


def between(world: World, path: str, strategy: ShardingStrategy) -> list[list[str]]:
    """Gathers of backward after: nothing, unshard of block 0, reshard of block 1."""
    model = sharded_gpt(path, strategy=strategy, backward_prefetch=None)
    plain = TinyGPT()
    averaged_gradients(plain, [gpt_input(0, r) for r in range(world.world_size)])
    expected = {n: p.grad for n, p in plain.named_parameters()}
    found = []
    for action in (None, unshard, reshard):
        model.zero_grad()
        loss = loss_of(model, gpt_input(0, world.rank))
        if action is unshard:
            unshard(module_at(model, "blocks.0"))
            assert not is_sharded(module_at(model, "blocks.0"))
        elif action is reshard:
            reshard(module_at(model, "blocks.1"))
        assert is_sharded(module_at(model, "blocks.1"))
        with watched() as events:
            backward(loss)
        found.append(units_of(events, "gather"))
        assert all(is_sharded(module_at(model, f"blocks.{i}")) for i in (0, 1))
        with unshard_params(model):
            names = [n for n, _ in model.named_parameters()]
        grads = whole_gradients(world, model)
        assert list(expected) == names
        for name in names:
            assert torch.equal(grads[name], whole(expected[name])), name
    return found


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.flatten()


def whole_gradients(world: World, model: nn.Module) -> dict[str, Tensor]:
    """Full gradients, flat, gathered from all ranks."""
    mine = {n: whole(own_gradient(p)) for n, p in model.named_parameters()}
    every = world.gather(mine)
    return {n: torch.cat([ranks[n] for ranks in every]) for n in mine}


@pytest.mark.req("B-09")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("strategy", "gathers"),
    [
        (
            ShardingStrategy.FULL_SHARD,
            [["blocks.1", "blocks.0"], ["blocks.1"], ["blocks.1", "blocks.0"]],
        ),
        (ShardingStrategy.SHARD_GRAD_OP, [[], [], ["blocks.1"]]),
    ],
)
def test_between_forward_and_backward_a_unit_can_be_gathered_or_freed(
    ranks: RankCount, strategy: ShardingStrategy, gathers: list[list[str]], path: str
) -> None:
    """What is full needs no gather in backward, what was freed does; gradients stay
    those of the reference."""
    assert ranks(2).run(between, path, strategy) == [gathers] * 2


@pytest.mark.req("B-09")
@on_ranks(2)
def test_an_asynchronous_unshard_is_waited_for_by_handle_or_forward(
    world: World,
) -> None:
    """``wait`` shows the full parameters, once; after the unit's forward it is late.

    The handle shows the parameters; the unit's forward does so too.
    """
    model = sharded_gpt("composable")
    block = module_at(model, "blocks.0")
    pending = unshard(block, async_op=True)
    assert isinstance(pending, UnshardHandle)
    assert is_sharded(block)
    pending.wait()
    assert not is_sharded(block)
    pending.wait()
    reshard(block)
    reshard(block)
    assert is_sharded(block)

    late = unshard(block, async_op=True)
    assert late is not None
    model(gpt_input(0, world.rank))
    late.wait()
    assert is_sharded(block)


@pytest.mark.req("B-09")
@on_ranks(2)
def test_a_unit_without_parameters_sends_nothing(world: World) -> None:
    """The verbs are not recursive, and do nothing where there is nothing.

    A unit all of whose parameters are its children's.
    """
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(2)))
    fully_shard(model)
    with record_steps() as calls:
        pending = unshard(model, async_op=True)
        assert pending is not None
        pending.wait()
        unshard(model)
        reshard(model)
    assert calls == []
    assert is_sharded(module_at(model, "0"))
    backward(loss_of(model, torch.ones(2, 4)))


def write_shards_meanwhile(world: World) -> str:
    """An optimizer steps while a unit is full by hand."""
    model = sharded_gpt("composable")
    optimizer = sgd(model.parameters())
    backward(loss_of(model, gpt_input(0, world.rank)))
    unshard(module_at(model, "blocks.0"))
    optimizer.step()
    with pytest.raises(PhaseError) as caught:
        model(gpt_input(0, world.rank))
    reshard(module_at(model, "blocks.0"))
    model(gpt_input(0, world.rank))
    return str(caught.value)


def test_old_full_values_are_not_used_after_an_optimizer_step(
    ranks: RankCount,
) -> None:
    """The next forward names the unit and the way out, which works."""
    for text in ranks(2).run(write_shards_meanwhile):
        assert "shards of fully sharded module 'blocks.0' were written to" in text
        assert "reshard(module)" in text


@on_ranks(2)
def test_a_unit_is_full_by_hand_until_its_forward_only(world: World) -> None:
    """After it, new values in the shards are gathered and not refused.

    Make a unit full that forward keeps, drop the loss, change the shards.
    """
    model = sharded_gpt("composable", strategy=ShardingStrategy.SHARD_GRAD_OP)
    plain = TinyGPT()
    unshard(module_at(model, "blocks.0"))
    loss_of(model, gpt_input(0, world.rank))
    with torch.no_grad():
        for p in [*model.parameters(), *plain.parameters()]:
            p.mul_(0.5)
    assert torch.equal(model(gpt_input(0, 0)), plain(gpt_input(0, 0)))


class Peeking(nn.Module):
    """Uses the weight of a unit that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.table = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 4)`` to the same."""
        y: Tensor = nn.functional.linear(self.body(x), self.table.weight)
        return y


@pytest.mark.req("B-09")
@on_ranks(2)
def test_a_full_unit_can_be_used_without_its_forward(world: World) -> None:
    """It stays full through the forward of the root and gets its gradient.

    The parent reads the weights of a unit made full before its forward.
    """
    model = Peeking()
    plain = copy.deepcopy(model)
    sharded = apply_units(model, ["body", "table"])
    inputs = [torch.ones(2, 4) * (r + 1) for r in range(world.world_size)]
    averaged_gradients(plain, inputs)
    unshard(model.table)
    backward(loss_of(sharded, inputs[world.rank]))
    assert is_sharded(model.table)
    grads = [model.table.weight.grad, plain.table.weight.grad]
    assert torch.equal(torch.cat(world.gather(grads[0])), whole(grads[1]).view(4, 4))


@on_ranks(2)
def test_verbs_refuse_moments_that_would_break_a_step(world: World) -> None:
    """Each error says where it was called; the next forward works.

    Inside a block of ``unshard_params``, and inside the unit's own forward.
    """
    model = sharded_gpt("composable")
    block = module_at(model, "blocks.0")
    with unshard_params(model):
        for verb in (unshard, reshard):
            with pytest.raises(PhaseError, match="inside unshard_params of \\(root\\)"):
                verb(block)

    def call(module: nn.Module, *_: object) -> None:
        reshard(module)

    hook = block.register_forward_pre_hook(call)
    with pytest.raises(PhaseError, match="while its forward is running"):
        model(gpt_input(0, world.rank))
    hook.remove()
    model(gpt_input(0, world.rank))


def test_verbs_take_fully_sharded_modules_only(one_rank: World) -> None:
    """A module inside a unit is refused."""
    model = fully_shard(tiny_mlp())

    for verb in (unshard, reshard, is_sharded):
        with pytest.raises(CompositionError, match="Linear that is no fully sharded"):
            verb(model[0])


# ---- beside FSDP2 -------------------------------------------------------------

Operation = str
OPERATIONS = ("unshard", "async", "wait", "reshard", "evaluate", "forward", "backward")


def legal(operations: list[Operation]) -> list[Operation]:
    """Drop what has no partner, or what FSDP2 leaves half done.

    A ``reshard`` with a gather under way leaves it under way there; here it ends it.
    """
    kept: list[Operation] = []
    pending = forward = False
    for operation in operations:
        if operation == "reshard" and pending:
            continue
        if operation == "wait" and not pending:
            continue
        if operation == "backward" and not forward:
            continue
        if operation in ("forward", "evaluate") and forward:
            continue
        forward = {"forward": True, "backward": False}.get(operation, forward)
        pending = operation == "async"
        kept.append(operation)
    return kept


def trace(
    operations: list[Operation],
    model: nn.Module,
    block: nn.Module,
    verbs: Sequence[Callable[..., Any]],
    full: int,
    x: Tensor,
) -> list[bool]:
    """Whether the block shows full parameters after each operation."""
    shown, pending, loss = [], None, None
    for operation in operations:
        if operation == "unshard":
            verbs[0]()
        elif operation == "async":
            pending = verbs[0](async_op=True)
        elif operation == "wait":
            assert pending is not None
            pending.wait()
        elif operation == "reshard":
            verbs[1]()
        elif operation == "evaluate":
            with torch.no_grad():
                model(x)
        elif operation == "forward":
            loss = loss_of(model, x)
        else:
            assert loss is not None
            backward(loss)
        parameters: list[Any] = list(block.parameters())
        parameters = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
        shown.append(sum(p.numel() for p in parameters) == full)
    return shown


def ours_and_theirs(operations: list[Operation], x: Tensor) -> list[Any]:
    """What the block shows after each operation and its gathers; both libraries."""
    import torch.distributed.fsdp as fsdp2
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    full = sizes(tiny_mlp()[0])
    theirs = tiny_mlp()
    their_block: Any = fsdp2.fully_shard(theirs[0])
    fsdp2.fully_shard(theirs)
    ours = tiny_mlp()
    block = fully_shard(ours[0])
    fully_shard(ours)
    state = their_block._get_fsdp_state()
    # One group until torch 2.12, a list of them since.
    several = getattr(state, "_fsdp_param_groups", None)
    (group,) = [state._fsdp_param_group] if several is None else several
    internals: Any = _fsdp_param_group
    real, their_gathers = internals.foreach_all_gather, 0

    def spy(parameters: object, *args: Any) -> Any:
        nonlocal their_gathers
        their_gathers += parameters is group.fsdp_params
        return real(parameters, *args)

    verbs: Any = (partial(unshard, block), partial(reshard, block))
    with watched() as events:
        mine = trace(operations, ours, block, verbs, full, x)
    internals.foreach_all_gather = spy
    try:
        verbs = their_block.unshard, their_block.reshard
        expected = trace(operations, theirs, their_block, verbs, full, x)
    finally:
        internals.foreach_all_gather = real
    return [mine, units_of(events, "gather").count("0"), expected, their_gathers]


def beside_fsdp2(world: World, batch: list[list[Operation]]) -> None:
    """The same operations on ours and on FSDP2."""
    for operations in batch:
        x = torch.ones(2, 8) * (world.rank + 1)
        mine, gathers, expected, their_gathers = ours_and_theirs(operations, x)
        assert mine == expected, operations
        assert gathers == their_gathers, operations


@pytest.mark.req("B-09")
@examples(12)
@given(
    batch=st.lists(
        st.lists(st.sampled_from(OPERATIONS), min_size=2, max_size=9).map(legal),
        min_size=1,
        max_size=4,
    )
)
def test_verbs_do_what_those_of_fsdp2_do(
    ranks: RankCount, batch: list[list[Operation]]
) -> None:
    """After any operations a unit shows full parameters where FSDP2's does, and as
    many gathers were sent."""
    ranks(2).run(beside_fsdp2, batch)


# ---- when units free their parameters -----------------------------------------


def choose_after_forward(world: World, path: str) -> list[list[str]]:
    """Gathers of backward: default; all kept; root freed too; block 0 alone kept."""
    found = []
    for choice in range(4):
        model = sharded_gpt(path, backward_prefetch=None)
        if choice == 1:
            set_reshard_after_forward(model, False)
        elif choice == 2:
            set_reshard_after_forward(model, True)
        elif choice == 3:
            block = module_at(model, "blocks.0")
            set_reshard_after_forward(block, False, recurse=False)
        for _ in range(2):
            loss = loss_of(model, gpt_input(0, world.rank))
            with watched() as events:
                backward(loss)
        found.append(units_of(events, "gather"))
    return found


@pytest.mark.parametrize("path", PATHS)
def test_what_forward_frees_can_be_chosen_per_unit(ranks: RankCount, path: str) -> None:
    """Backward gathers what was freed, the root included if that was asked for."""
    assert (
        ranks(2).run(choose_after_forward, path)
        == [
            [
                ["blocks.1", "blocks.0"],
                [],
                ["", "blocks.1", "blocks.0"],
                ["blocks.1"],
            ]
        ]
        * 2
    )


def accumulate(world: World, path: str) -> list[list[str]]:
    """Gathers of the forwards of two micro-batches a step, kept in between."""
    model, plain = TinyGPT(), TinyGPT()
    sharded = apply_units(model, gpt_units(model), path=path)
    optimizer, reference = sgd(sharded.parameters()), sgd(plain.parameters())
    found = []
    for step in range(2):
        batches = [
            [gpt_input(2 * step + i, r) for r in range(world.world_size)]
            for i in range(2)
        ]
        for i, inputs in enumerate(batches):
            set_reshard_after_backward(sharded, i == 1)
            with watched() as events:
                loss = loss_of(sharded, inputs[world.rank])
            backward(loss)
            found.append(units_of(events, "gather"))
            assert all(is_sharded(state.module) for state in _get_fsdp_states(sharded))
        grads: dict[str, Tensor] = {}
        for inputs in batches:
            averaged_gradients(plain, inputs)
            for n, p in plain.named_parameters():
                assert p.grad is not None
                grads[n] = grads[n] + p.grad if n in grads else p.grad.clone()
        for n, p in plain.named_parameters():
            p.grad = grads[n]
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same_training(sharded, plain, [], [], tolerance=1e-6)
    return found


@pytest.mark.parametrize("path", PATHS)
def test_parameters_kept_after_backward_are_not_gathered_again(
    ranks: RankCount, path: str
) -> None:
    """The second micro-batch needs no gather in forward, the next step does."""
    assert (
        ranks(2).run(accumulate, path) == [[["", "blocks.0", "blocks.1"], []] * 2] * 2
    )


@on_ranks(2)
def test_parameters_kept_over_an_optimizer_step_are_refused(world: World) -> None:
    """The weights are those of one step, and not one more trained on old values.

    Keep over an optimizer step, get the error, go the way out, train on.
    """
    model, plain = TinyGPT(), TinyGPT()
    sharded = apply_units(model, gpt_units(model))
    set_reshard_after_backward(sharded, False)
    with pytest.raises(PhaseError, match="set_reshard_after_backward"):
        train(sharded, world.rank, gpt_input, sgd, steps=2)
    train_reference(plain, world.world_size, gpt_input, sgd, steps=1)
    set_reshard_after_backward(sharded, True)
    assert_same_training(sharded, plain, [], [])
