"""Claims on full parameters outside the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CompositionError,
    FullyShardedDataParallel,
    PhaseError,
    ShardingStrategy,
    fully_shard,
    optim_state_dict,
    unshard_params,
)
from composable_fsdp.access.unshard_params import _unshard_params_recurse
from composable_fsdp.access.unsharded_unit import _unshard_state
from composable_fsdp.comm.collectives import record
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    STRATEGIES,
    apply_units,
    differences,
    gpt_input,
    loss_of,
)
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    is_full,
    message_of,
    one_to_three_ranks,
    step,
)
from tests.support.world import World

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


def values(model: nn.Module) -> dict[str, Tensor]:
    """The parameters as they are now, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def write(model: nn.Module, *, add: float) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.add_(add + index)


@pytest.mark.req("S1-10", "S1-13")
@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("moment", ["before the first forward", "after a step"])
def test_inside_the_block_a_model_shows_what_the_plain_one_has(
    world: World, path: str, moment: str
) -> None:
    """Names, order and bits are the plain model's; then the old objects are back."""
    model, plain = gpt(path), TinyGPT()
    leaves = list(model.parameters())
    if moment == "after a step":
        step(model, torch.optim.SGD(leaves, lr=0.1), world.rank, 0)
        plain.load_state_dict(model.state_dict())

    with unshard_params(model):
        inside = values(model)
        shown = is_full(model)

    assert shown == [True] * 3
    assert differences(inside, dict(plain.named_parameters())) == {}
    assert is_full(model) == [False] * 3
    assert [name for name, _ in model.named_parameters()] == list(inside)
    assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))


@pytest.mark.req("S1-10")
@on_ranks(1, 2, 3)
@both_paths
def test_each_level_unshards_the_units_it_names_and_no_other(
    world: World, path: str
) -> None:
    """``recurse=False`` touches one unit; each unit costs one all-gather."""
    model = gpt(path)
    states = _get_fsdp_states(model)
    levels: dict[str, tuple[Any, list[bool]]] = {
        "root alone": (unshard_params(model, recurse=False), [True, False, False]),
        "block alone": (
            unshard_params(model.get_submodule("blocks")[1], recurse=False),  # type: ignore[index]
            [False, False, True],
        ),
        "root and below": (unshard_params(model), [True] * 3),
        "one state": (
            _unshard_state(states[1], writeback=False, rank0_only=False),
            [False, True, False],
        ),
        "a state and below": (
            _unshard_params_recurse(
                states[0].module,
                states[0],
                recurse=True,
                writeback=False,
                rank0_only=False,
            ),
            [True] * 3,
        ),
    }
    for name, (block, expected) in levels.items():
        with record_steps() as calls, block:
            shown = is_full(model)

        assert shown == expected, name
        assert is_full(model) == [False] * 3, name
        gathers = sum(expected) if world.world_size > 1 else 0
        # With writeback, which is the default, ranks say on exit that none raised.
        writes = name in ("root alone", "block alone", "root and below")
        end = ["all_reduce"] if gathers and writes else []
        assert [call.op for call in calls] == ["all_gather"] * gathers + end, name


@every_strategy
@on_ranks(1, 2, 3)
@both_paths
def test_what_the_block_writes_reaches_the_shards(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """Each rank keeps its own part; together they are what was written, bit by bit."""
    model, plain = gpt(path, strategy=strategy), TinyGPT()

    with unshard_params(model, writeback=True):
        write(model, add=1.5)
    write(plain, add=1.5)

    assert differences(model.state_dict(), plain.state_dict()) == {}


def check_discarded(
    world: World, path: str, strategy: ShardingStrategy, how: str
) -> None:
    model = gpt(path, strategy=strategy)
    before = model.state_dict()

    with record() as calls:
        try:
            with unshard_params(model, writeback=how == "a raise"):
                entered = len(calls)
                write(model, add=1.5)
                if how == "a raise":
                    raise KeyError("in the block")
        except KeyError:
            pass

    told = [call.nbytes for call in calls[entered:]]
    assert told == ([4] if how == "a raise" and world.world_size > 1 else [])
    assert is_full(model) == [False] * 3
    assert differences(model.state_dict(), before) == {}


@both_paths
@pytest.mark.parametrize("how", ["writeback is off", "a raise"])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (2, ShardingStrategy.FULL_SHARD),
        (3, ShardingStrategy.FULL_SHARD),
        (1, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.NO_SHARD),
    ],
)
def test_nothing_is_written_without_writeback_or_after_a_raise(
    ranks: RankCount,
    path: str,
    world_size: int,
    strategy: ShardingStrategy,
    how: str,
) -> None:
    """The shards keep their bits, every unit is sharded, and no value is sent."""
    ranks(world_size).run(check_discarded, path, strategy, how)


@on_ranks(1, 2, 3)
@both_paths
def test_only_rank_0_sees_full_parameters_when_told_so(world: World, path: str) -> None:
    """The other ranks keep seeing their shards, and nothing is gathered onto them."""
    model, plain = gpt(path), TinyGPT()
    shards = values(model)

    with (
        record_steps() as calls,
        unshard_params(model, rank0_only=True, writeback=False),
    ):
        inside = values(model)

    assert {call.op for call in calls} == (
        {"gather"} if world.world_size > 1 else set()
    )
    expected = values(plain) if world.rank == 0 else shards
    assert differences(inside, expected) == {}
    assert is_full(model) == [False] * 3


@every_strategy
@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("assign", [False, True], ids=["in place", "assigned"])
def test_values_of_rank_0_reach_every_shard(
    world: World, path: str, strategy: ShardingStrategy, assign: bool
) -> None:
    """With both options the shards of all ranks are cut from rank 0's values."""
    model, plain = gpt(path, strategy=strategy), TinyGPT()

    with unshard_params(model, rank0_only=True, writeback=True):
        if world.rank == 0:
            write(model, add=2.5)
            if assign:
                norm = model.get_submodule("norm")
                norm.weight = nn.Parameter(torch.arange(8.0))
    write(plain, add=2.5)
    if assign:
        plain.norm.weight = nn.Parameter(torch.arange(8.0))

    assert differences(model.state_dict(), plain.state_dict()) == {}
    assert world.all_equal(model.state_dict())


@on_ranks(1, 2, 3)
@both_paths
def test_a_parameter_assigned_in_the_block_is_taken_up(world: World, path: str) -> None:
    """Its values are kept; the object in the module is the original one again."""
    model = apply_units(tiny_mlp(), [], path=path)
    layer, leaf = model[0], model[0].weight  # type: ignore[index]

    with unshard_params(model):
        layer.weight = nn.Parameter(torch.full((12, 8), 7.0))

    assert layer.weight is leaf
    assert torch.equal(model.state_dict()["0.weight"], torch.full((12, 8), 7.0))


@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("writeback", [True, False])
def test_memory_that_the_block_gave_a_parameter_ends_with_it(
    world: World, path: str, writeback: bool
) -> None:
    """After ``parameter.data = values`` the values count and later updates show."""
    model = apply_units(tiny_mlp(), [], path=path)
    weight = model[0].weight  # type: ignore[index]
    before = model.state_dict()["0.weight"]
    given = torch.full((12, 8), 7.0)

    with unshard_params(model, writeback=writeback):
        model[0].weight.data = given.clone()  # type: ignore[index]
    weight.data.mul_(2)  # as an optimizer does

    with unshard_params(model):
        shown = model[0].weight.clone()  # type: ignore[index]
    assert torch.equal(shown, 2 * (given if writeback else before))


def check_misfit(world: World, path: str) -> tuple[str, str]:
    model = gpt(path)
    before = model.state_dict()
    norm = model.get_submodule("blocks")[1].norm_2  # type: ignore[index]
    texts = []
    for wrong in (nn.Parameter(torch.ones(3)), None, torch.ones(3)):

        def act(wrong: Tensor | None = wrong) -> None:
            with unshard_params(model):
                if wrong is None or isinstance(wrong, nn.Parameter):
                    norm.weight = wrong
                else:
                    norm.weight.data = wrong

        texts.append(message_of(act))

    assert texts[2] == texts[0]
    assert differences(model.state_dict(), before) == {}
    assert is_full(model) == [False] * 3
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    return texts[0], texts[1]


@one_to_three_ranks
@both_paths
def test_a_parameter_of_another_shape_is_refused_by_name(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """The message has name, both shapes and the way out; the model is as it was."""
    for shape, gone in ranks(world_size).run(check_misfit, path):
        assert shape == (
            "PhaseError: Inside unshard_params parameter 'blocks.1.norm_2.weight' was "
            "replaced by (3,) torch.float32; expected (8,) torch.float32. Write into "
            "it in place, for example parameter.data.copy_(values)."
        )
        assert "'blocks.1.norm_2.weight' was replaced by NoneType" in gone


@pytest.mark.req("S1-10")
@on_ranks(1, 2, 3)
@both_paths
def test_a_plain_module_unshards_every_tree_below_it(world: World, path: str) -> None:
    """Two trees under a module that is no unit are full together."""

    def parts() -> tuple[nn.Module, nn.Module, nn.Module]:
        return tiny_mlp(), tiny_mlp(seed=1), tiny_mlp(seed=2)

    first, middle, last = parts()
    holder = nn.Sequential(
        apply_units(first, [], path=path), middle, apply_units(last, [], path=path)
    )
    plain = nn.Sequential(*parts())

    with unshard_params(holder, writeback=True):
        inside = list(values(holder).values())
        write(holder, add=0.5)
    same = [torch.equal(a, b) for a, b in zip(inside, plain.parameters(), strict=True)]
    write(plain, add=0.5)

    assert all(same)
    assert is_full(holder) == [False, False]
    assert differences(holder.state_dict(), plain.state_dict()) == {}


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def check_between(world: World, path: str) -> str:
    models = [gpt(path), gpt(path)]
    x = gpt_input(0, world.rank)
    for model, look in zip(models, (False, True), strict=True):
        loss = loss_of(model, x)
        if look:
            with unshard_params(model):
                values(model)
        loss.backward()  # type: ignore[no-untyped-call]
    untouched, looked = map(gradients, models)

    assert len(looked) == len(untouched) > 0
    assert all(torch.equal(a, b) for a, b in zip(looked, untouched, strict=True))
    loss = loss_of(models[0], x)
    with unshard_params(models[0]):
        write(models[0], add=1.0)
    return message_of(loss.backward)


@one_to_three_ranks
@both_paths
def test_looking_between_forward_and_backward_changes_no_gradient(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """Reading is free; after writing autograd refuses backward, as on a plain model."""
    for text in ranks(world_size).run(check_between, path):
        assert "modified by an inplace operation" in text


class Calls(nn.Module):
    """Calls back in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()
        self.callback: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.callback is not None:
            self.callback()
        y: Tensor = self.inner(x)
        return y


def check_refusals(world: World, path: str) -> dict[str, str]:
    inner = Calls()
    model = apply_units(inner, ["inner"], path=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8)
    texts = {}

    def nested() -> None:
        with unshard_params(model), unshard_params(inner.inner):
            pass

    def forward_inside() -> None:
        with unshard_params(model):
            model(x)

    def optimizer_state_inside() -> None:
        with unshard_params(model):
            optim_state_dict(model, optimizer)

    def enter() -> None:
        unshard_params(model).__enter__()

    def in_forward() -> None:
        inner.callback = enter
        try:
            model(x)
        finally:
            inner.callback = None

    def in_backward() -> None:
        y = model(x)
        y.register_hook(lambda _: enter())
        y.sum().backward()

    for act in (
        nested,
        forward_inside,
        optimizer_state_inside,
        in_forward,
        in_backward,
    ):
        texts[act.__name__] = message_of(act)

        assert is_full(model) in ([False, False], [True, False]), act.__name__
        model(x).sum().backward()
        assert is_full(model) == [False, False], act.__name__
    return texts


@one_to_three_ranks
@both_paths
def test_wrong_moments_are_refused_with_the_way_out(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """Each message names both calls and when to call instead; training goes on."""
    for texts in ranks(world_size).run(check_refusals, path):
        assert all(text.startswith(PhaseError.__name__) for text in texts.values())
        assert "inside unshard_params of (root)" in texts["nested"]
        assert "Call it after the block" in texts["nested"]
        assert "was called inside unshard_params of (root)" in texts["forward_inside"]
        assert texts["optimizer_state_inside"].startswith(
            "PhaseError: optim_state_dict was called on (root) inside unshard_params"
        )
        assert "inside the forward of (root)" in texts["in_forward"]
        assert "Call it between steps" in texts["in_forward"]
        assert "inside backward" in texts["in_backward"]
        assert "after loss.backward() has returned" in texts["in_backward"]


@on_ranks(1, 2, 3)
@both_paths
def test_state_dicts_are_given_and_taken_inside_the_block(
    world: World, path: str
) -> None:
    """Saving copies the full parameters; what is loaded reaches the shards."""
    model, plain = gpt(path), TinyGPT()

    with unshard_params(model):
        saved = model.state_dict()
        model.load_state_dict(TinyGPT(seed=5).state_dict())

    assert differences(saved, plain.state_dict()) == {}
    assert differences(model.state_dict(), TinyGPT(seed=5).state_dict()) == {}


@both_paths
@on_ranks(2)
def test_a_state_dict_inside_the_block_has_the_assigned_parameter(
    world: World, path: str
) -> None:
    """What the module shows is what is saved."""
    model = apply_units(tiny_mlp(), [], path=path)

    with unshard_params(model):
        model[0].bias = nn.Parameter(torch.full((12,), 7.0))  # type: ignore[index]
        saved = model.state_dict()

    assert torch.equal(saved["0.bias"], torch.full((12,), 7.0))


def test_a_model_without_units_is_refused() -> None:
    """The message says what to do instead."""
    with pytest.raises(CompositionError, match="on a Linear that holds no fully"):
        unshard_params(nn.Linear(2, 2)).__enter__()


@on_ranks(2, 3)
def test_summon_full_params_is_the_same_block(world: World) -> None:
    """The wrapper's FSDP1 name passes its options on."""
    model, plain = gpt("wrapper"), TinyGPT()

    with FullyShardedDataParallel.summon_full_params(model, recurse=False):
        shown = is_full(model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=True):
        write(model, add=1.0)
    write(plain, add=1.0)

    assert shown == [True, False, False]
    assert differences(model.state_dict(), plain.state_dict()) == {}


@on_ranks(2)
def test_a_unit_that_stands_in_two_places_is_shown_once(world: World) -> None:
    """Found by the state machine: the second block freed what the first one showed."""
    shared = nn.Linear(3, 3)
    holder = nn.Sequential(shared)
    model = nn.Sequential(shared, holder)
    before = shared.weight.detach().clone()
    for unit in (shared, holder, model):
        fully_shard(unit)

    # Its parent is the root; it stands below the other unit as well.
    with unshard_params(holder, writeback=True):
        shared.weight.data.mul_(2.0)

    assert torch.equal(model.state_dict()["0.weight"], before * 2)


def test_a_block_over_a_unit_that_another_shows_is_refused(one_rank: World) -> None:
    """And the first one goes on."""
    model = fully_shard(tiny_mlp())
    (state,) = _get_fsdp_states(model)

    with unshard_params(model):
        with (
            pytest.raises(PhaseError, match="shown by another block"),
            _unshard_state(state, writeback=True, rank0_only=False),
        ):
            pass
        shown = model[0].weight.shape

    assert shown == (12, 8)
