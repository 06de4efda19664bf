"""``copy.deepcopy`` of sharded models: a model of its own, or an error in a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from composable_fsdp import (
    FullyShardedDataParallel,
    PhaseError,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    set_gradient_divide_factor,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_handles, _get_fsdp_states
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
    train,
    train_reference,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def sharded_gpt(
    path: str, strategy: ShardingStrategy = STRATEGIES[0], *, tied: bool = False
) -> tuple[nn.Module, nn.Module]:
    """A small GPT with a unit per block, and the same model unsharded."""
    model = TinyGPT(tied_head=tied)
    plain = copy.deepcopy(model)
    units = gpt_units(model)
    return apply_units(model, units, path=path, strategy=strategy), plain


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_a_copy_and_its_original_train_apart(
    world: World, path: str, strategy: ShardingStrategy, tied: bool
) -> None:
    """Copied after a step, both go on as copies of the plain model do, bit by bit.

    One step, a copy, then the two go on from there on different inputs.
    """
    model, plain = sharded_gpt(path, strategy, tied=tied)
    train(model, world.rank, gpt_input, sgd, steps=1)
    train_reference(plain, world.world_size, gpt_input, sgd, steps=1)
    made, plain_copy = copy.deepcopy(model), copy.deepcopy(plain)

    for ours, theirs, shift in ((made, plain_copy, 5), (model, plain, 9)):
        later = lambda step, rank, by=shift: gpt_input(step + by, rank)  # noqa: E731
        expected = train_reference(theirs, world.world_size, later, sgd)
        losses = train(ours, world.rank, later, sgd)
        mine = [step[world.rank] for step in expected]
        assert_same_training(ours, theirs, losses, mine)
    assert type(made) is type(model)
    assert list(made.state_dict()) == list(plain.state_dict())


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_a_moving_average_of_the_parameters_is_that_of_the_plain_model(
    world: World, path: str, frozen: bool
) -> None:
    """Parameters of copy and original pair up, and the copy computes with its own.

    Three steps; after each, the copy moves a tenth of the way.
    """
    model, plain = sharded_gpt(path)
    ema, plain_ema = copy.deepcopy(model), copy.deepcopy(plain)
    ema.requires_grad_(not frozen)
    for m, e, make in (
        (plain, plain_ema, lambda m: train_reference(m, 2, gpt_input, sgd, steps=1)),
        (model, ema, lambda m: train(m, world.rank, gpt_input, sgd, steps=1)),
    ):
        for _ in range(3):
            make(m)
            with torch.no_grad():
                for old, new in zip(e.parameters(), m.parameters(), strict=True):
                    old.lerp_(new, 0.1)

    x = gpt_input(7, world.rank)
    assert_same_training(ema, plain_ema, [], [])
    assert torch.equal(ema(x), plain_ema(x))
    assert not torch.equal(ema(x), model(x))


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_torchs_averaged_model_takes_a_sharded_model(world: World, path: str) -> None:
    """It copies the model and averages shard by shard.

    Torch's AveragedModel over a sharded model.
    """
    model, plain = sharded_gpt(path)
    rule = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]  # torch
    ema, plain_ema = (AveragedModel(m, multi_avg_fn=rule) for m in (model, plain))
    for _ in range(2):
        train(model, world.rank, gpt_input, sgd, steps=1)
        train_reference(plain, 2, gpt_input, sgd, steps=1)
        ema.update_parameters(model)
        plain_ema.update_parameters(plain)

    assert_same_training(ema.module, plain_ema.module, [], [])


def storage_of(handle: object) -> tuple[int, ...]:
    """Where the shards of a handle are."""
    return tuple(r.shard.data_ptr() for r in handle.layout.regions)  # type: ignore[attr-defined]


def changing_fields(state: _FSDPState) -> set[int]:
    """Identities of the containers and objects in ``state`` that runtime changes."""
    values = (getattr(state, n) for n in _FSDPState.__slots__ if n != "__weakref__")
    kinds = (list, set, dict, _FSDPState)
    found = {id(v) for v in values if isinstance(v, kinds)}
    return found | {id(state.handle)}


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_copy_shares_groups_and_settings_and_nothing_else(
    world: World, path: str
) -> None:
    """Shards, handles, hooks and owners are its own; making it sends nothing.

    Look for what a copy has in common with its original.
    """
    model, _ = sharded_gpt(path)
    backward(loss_of(model, gpt_input(0, world.rank)))
    with record() as calls:
        made = copy.deepcopy(model)
    old, new = _get_fsdp_handles(model), _get_fsdp_handles(made)

    assert calls == []
    assert not {storage_of(h) for h in old} & {storage_of(h) for h in new}
    assert all(p.grad is None for p in made.parameters())
    for a, b in zip(_get_fsdp_states(model), _get_fsdp_states(made), strict=True):
        assert b.context is None
        assert (b.parent is None) == (a.parent is None)
        assert b.parent is None or b.parent in _get_fsdp_states(made)
        assert b.handle.groups is a.handle.groups
        assert changing_fields(a) & changing_fields(b) == set()
    modules = list(made.modules())
    states = [_get_module_fsdp_state(m) for m in modules]
    assert all(s in _get_fsdp_states(made) for s in states)
    assert all(info.module in modules for h in new for info in h.infos)
    assert all(find_leaf(p) is not None for p in made.parameters())
    with pytest.warns(UserWarning, match="found no gradient"):
        assert clip_grad_norm_(made, 1.0).item() == 0.0


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_copy_in_the_middle_of_a_step_is_refused(world: World, path: str) -> None:
    """Each moment is named; between forward and backward the shards can be copied.

    Try in forward, between, in backward, and in an ``unshard_params`` block.
    """
    model, _ = sharded_gpt(path)
    inner = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))

    def attempt(*_: object) -> None:
        with pytest.raises(PhaseError, match=r"copy\.deepcopy was called on") as error:
            copy.deepcopy(model)
        tried.append(str(error.value))

    tried: list[str] = []
    hook = inner.register_forward_hook(attempt)
    y = model(gpt_input(0, world.rank))
    hook.remove()
    between = copy.deepcopy(model)
    y.register_hook(attempt)
    backward(y.sum())
    with unshard_params(model):
        attempt()

    for text, where in zip(tried, ("forward", "backward", "unshard_par"), strict=True):
        assert f"inside {'the ' * (where == 'forward')}{where}" in text
    expected = model.state_dict()
    assert all(torch.equal(v, expected[n]) for n, v in between.state_dict().items())


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_copied_unit_is_a_root_of_its_own(world: World, path: str) -> None:
    """It trains alone, and the tree it came from is as before.

    Copy a unit out of its tree and train it alone, as a root.
    """
    model, plain = sharded_gpt(path)
    loss_of(model, gpt_input(0, world.rank))
    block = model.get_submodule("blocks")[1]  # type: ignore[index]
    made, theirs = copy.deepcopy(block), copy.deepcopy(plain.get_submodule("blocks.1"))
    make = lambda step, rank: torch.randn(  # noqa: E731
        2, 5, 8, generator=torch.Generator().manual_seed(10 * step + rank)
    )

    expected = train_reference(theirs, 2, make, sgd)
    losses = train(made, world.rank, make, sgd)
    assert_same_training(made, theirs, losses, [s[world.rank] for s in expected])
    state = _get_module_fsdp_state(made)
    assert state is not None
    assert state._is_root
    assert_same_training(model, plain, [], [])


@on_ranks(2)
def test_a_copy_made_before_the_first_forward_joins_another_tree(world: World) -> None:
    """A sharded model and its copy stand side by side under one root.

    Student and teacher under one new unit.
    """
    student = tiny_mlp()
    plain = nn.Sequential(student, copy.deepcopy(student))
    plain = copy.deepcopy(plain)
    fully_shard(student)
    pair = fully_shard(nn.Sequential(student, copy.deepcopy(student)))
    make: Callable[[int, int], Tensor] = lambda step, rank: torch.full(  # noqa: E731
        (2, 8), 1.0 + step + rank
    )

    expected = train_reference(plain, world.world_size, make, sgd)
    losses = train(pair, world.rank, make, sgd)
    assert_same_training(pair, plain, losses, [s[world.rank] for s in expected])
    assert [s._is_root for s in _get_fsdp_states(pair)] == [True, False, False]


def test_a_copy_keeps_settings_and_changes_its_own(one_rank: World) -> None:
    """A divide factor goes along; set on the copy, it stays the copy's."""
    model = fully_shard(tiny_mlp())
    set_gradient_divide_factor(model, 4.0)
    made = copy.deepcopy(model)
    other = copy.deepcopy(model)
    set_gradient_divide_factor(other, 2.0)

    norms = []
    for each in (model, made, other):
        backward(each(torch.ones(1, 8)).sum())
        norms.append(clip_grad_norm_(each, 1e9).item())

    assert norms[0] == norms[1] == pytest.approx(norms[2] / 2)


class Pair(nn.Module):
    """Two linears that one list unit holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


@on_ranks(2)
def test_a_unit_of_several_modules_is_copied_once(world: World) -> None:
    """The copies of the modules share one state, also in a copy of a copy.

    Copy a model in which two modules form one unit; then a copy of the copy.
    """
    model = Pair()
    plain = copy.deepcopy(model)
    fully_shard([model.a, model.b])
    fully_shard(model)
    made = copy.deepcopy(copy.deepcopy(model))
    make: Callable[[int, int], Tensor] = lambda step, rank: torch.full(  # noqa: E731
        (2, 6), 1.0 + step + rank
    )

    expected = train_reference(plain, world.world_size, make, sgd)
    losses = train(made, world.rank, make, sgd)
    assert_same_training(made, plain, losses, [s[world.rank] for s in expected])


class Copies(nn.Module):
    """A module whose class says how it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __deepcopy__(self, memo: dict[int, object]) -> Copies:
        made = Copies()
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear."""
        y: Tensor = self.linear(x)
        return y


def test_the_wrapper_of_a_module_that_copies_itself_is_copied_as_a_wrapper(
    one_rank: World,
) -> None:
    """The class's own ``__deepcopy__`` makes the inner copy, not the outer one."""
    model = FullyShardedDataParallel(Copies())

    made = copy.deepcopy(model)

    assert isinstance(made, FullyShardedDataParallel)
    x = torch.ones(1, 4)
    backward(made(x).sum())
    assert torch.equal(made(x), model(x))
    assert all(p.grad is not None for p in made.parameters())
    assert all(p.grad is None for p in model.parameters())
