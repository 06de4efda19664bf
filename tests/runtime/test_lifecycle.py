"""What a step leaves behind and the next one finds: memory, phases, broken steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, fully_shard
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.runtime.forward import post_forward, pre_forward
from composable_fsdp.runtime.graph_task import finish_task
from composable_fsdp.tree import root as root_module
from composable_fsdp.tree import traversal
from composable_fsdp.tree.traversal import _get_fsdp_handles, _get_fsdp_states
from tests.support.models import TinyGPT, module_at, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
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
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = STRATEGIES


def full_bytes(handle: FlatParamHandle) -> int:
    """Bytes of memory behind the unit's full parameters, of regions that are cut."""
    cut = [r.full.buffer for r in handle.layout.regions if r.full.is_cut]
    return sum(full.untyped_storage().nbytes() for full in cut)


def reduce_bytes(handle: FlatParamHandle) -> int:
    """Bytes of memory behind the unit's reduce buffers."""
    buffers = [r.reduce.buffer for r in handle.layout.trainable]
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers)


def resting(model: nn.Module) -> bool:
    """Whether every unit is sharded, idle and without memory of a step."""
    return all(
        full_bytes(h) == reduce_bytes(h) == 0
        and not (h.residency is not Residency.SHARDED or h.running.calls)
        and h.phase is Phase.IDLE
        and all(params[name] is leaf for params, name, leaf, _ in h.swaps)
        for h in _get_fsdp_handles(model)
    )


def sharded_gpt(path: str, strategy: ShardingStrategy = FULL_SHARD) -> nn.Module:
    """A small GPT with a unit per block."""
    model = TinyGPT()
    return apply_units(model, gpt_units(model), path=path, strategy=strategy)


def memory_of_a_step(
    world: World, path: str, strategy: ShardingStrategy
) -> tuple[list[bool], bool]:
    """Which units are full between forward and backward; whether all rest after."""
    model = sharded_gpt(path, strategy)
    loss = loss_of(model, gpt_input(0, world.rank))
    kept = [full_bytes(h) > 0 for h in _get_fsdp_handles(model)]
    backward(loss)
    return kept, resting(model)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("strategy", "kept"),
    [(FULL_SHARD, [True, False, False]), (SHARD_GRAD_OP, [True, True, True])],
)
def test_a_step_gives_its_memory_back(
    ranks: RankCount, path: str, strategy: ShardingStrategy, kept: list[bool]
) -> None:
    """After a step no full or reduce buffer has a byte; between, the root's has."""
    for between, rests in ranks(2).run(memory_of_a_step, path, strategy):
        assert between == kept
        assert rests


class Trip(nn.Module):
    """The identity; raises in forward or backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, or raise."""
        if self.where == "forward":
            raise RuntimeError("tripped in forward")
        if self.where == "backward" and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self.trip)  # type: ignore[no-untyped-call]  # torch
        return x

    def hook(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Run on the output of another module."""
        y: Tensor = self(output)
        return y

    def trip(self, gradient: Tensor) -> None:
        """A hook that raises."""
        raise RuntimeError("tripped in backward")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(1, 2)
def test_a_step_that_raises_on_all_ranks_leaves_a_usable_model(
    world: World, path: str, where: str
) -> None:
    """After the error is caught, the next steps have the right numbers.

    A step, one that raises on every rank, two more; numbers as without it.
    """
    plain = TinyGPT()
    trip = Trip()
    model = TinyGPT()
    module_at(model, "blocks.1.norm_2").register_forward_hook(trip.hook)
    sharded = apply_units(model, gpt_units(model), path=path)
    optimizer = sgd(sharded.parameters())
    expected = train_reference(plain, world.world_size, gpt_input, sgd)
    losses = []
    for step in range(3):
        loss = loss_of(sharded, gpt_input(step, world.rank))
        losses.append(loss.item())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            trip.where = where
            with pytest.raises(RuntimeError, match=f"tripped in {where}"):
                backward(loss_of(sharded, gpt_input(9, world.rank)))
            trip.where = ""
            optimizer.zero_grad()
            assert where == "backward" or resting(sharded)

    assert losses == [step[world.rank] for step in expected]
    assert resting(sharded)


def state_dict_after_a_broken_backward(world: World, path: str) -> bool:
    """Break a backward; then save, without a forward in between."""
    model = TinyGPT()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trip = Trip()
    module_at(model, "blocks.0.norm_1").register_forward_hook(trip.hook)
    sharded = apply_units(model, gpt_units(model), path=path)
    trip.where = "backward"
    with pytest.raises(RuntimeError, match="tripped"):
        backward(loss_of(sharded, gpt_input(0, world.rank)))
    after = sharded.state_dict()
    return all(torch.equal(after[n], v) for n, v in before.items()) and resting(sharded)


@pytest.mark.parametrize("path", PATHS)
def test_a_state_dict_can_be_taken_after_a_broken_backward(
    ranks: RankCount, path: str
) -> None:
    """The values are those before the step, and every unit is sharded again."""
    assert ranks(2).run(state_dict_after_a_broken_backward, path) == [True, True]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@on_ranks(2)
def test_evaluation_before_training_leaves_no_trace(
    world: World, path: str, mode: str
) -> None:
    """Outputs are the plain model's, memory is freed, training goes on.

    A forward without gradients before, between and after training steps.
    """
    model = TinyGPT()
    plain = copy.deepcopy(model)
    sharded = apply_units(model, gpt_units(model), path=path)
    without = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]
    optimizer, reference = sgd(sharded.parameters()), sgd(plain.parameters())

    for step in range(2):
        with without():
            y = sharded(gpt_input(step, world.rank))
            assert torch.equal(y, plain(gpt_input(step, world.rank)))
        assert resting(sharded)
        for m, o in ((sharded, optimizer), (plain, reference)):
            backward(loss_of(m, gpt_input(step, 0)))
            o.step()
            o.zero_grad()
    assert_same_training(sharded, plain, [], [])


def test_a_unit_made_under_inference_mode_trains(one_rank: World) -> None:
    """The mode in which ``fully_shard`` is called leaves no trace in training."""
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        fully_shard(model)

    backward(model(torch.ones(1, 2)).sum())

    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "strategy", [FULL_SHARD, SHARD_GRAD_OP], ids=lambda strategy: strategy.name
)
@on_ranks(2)
def test_a_forward_without_backward_is_forgotten_by_the_next(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """Weights left full by it are not used again after the shards have changed.

    A forward whose loss is dropped, then other values, then training.
    """
    model = TinyGPT()
    plain = copy.deepcopy(model)
    sharded = apply_units(model, gpt_units(model), path=path, strategy=strategy)
    # Between forward and backward, parameters() gives the full ones of units kept full.
    parameters = list(sharded.parameters())
    loss_of(sharded, gpt_input(5, world.rank))
    with torch.no_grad():
        for p in [*parameters, *plain.parameters()]:
            p.mul_(0.5)

    expected = train_reference(plain, world.world_size, gpt_input, sgd)
    losses = train(sharded, world.rank, gpt_input, lambda _: sgd(parameters))

    assert_same_training(
        sharded, plain, losses, [step[world.rank] for step in expected]
    )


Event = tuple[str, str]


def events(world: World, path: str) -> list[Event]:
    """Phases and collectives of two steps, from hooks on every unit's module."""
    model = TinyGPT()
    log: list[Event] = []
    units = {"root": model, **{u: module_at(model, u) for u in gpt_units(model)}}
    sharded = apply_units(model, gpt_units(model), path=path)
    with record_steps() as calls:

        def watch(name: str, moment: str) -> Callable[..., None]:
            def note(module: nn.Module, *_: Any) -> None:
                state = fully_shard.state(module)
                assert state is not None
                handle = state.handle
                log.append((f"{name} {moment}", f"{handle.phase.name} {len(calls)}"))

            return note

        for name, module in units.items():
            module.register_forward_pre_hook(watch(name, "before"))
            module.register_forward_hook(watch(name, "after"))
        for step in range(2):
            backward(loss_of(sharded, gpt_input(step, world.rank)))
            log.append(("step", f"{len(calls)}"))
    return log + [("call", str(call)) for call in calls]


@pytest.mark.req("S1-36")
def test_both_paths_have_one_event_log(ranks: RankCount) -> None:
    """Hooks, phases and collectives: one order on both paths and all ranks."""
    composable, wrapper = (ranks(2).run(events, path) for path in PATHS)

    assert composable == wrapper
    assert composable[0] == composable[1]
    assert len([event for event in composable[0] if event[0] == "call"]) == 16


def call_hooks_by_hand(world: World) -> None:
    """Forward and backward of a function that is no module's forward."""
    model = fully_shard(tiny_mlp(4))
    plain = tiny_mlp(4)
    state = fully_shard.state(model)
    assert state is not None
    x = torch.ones(2, 4) * (world.rank + 1)

    changed = pre_forward(state, model, (x.requires_grad_(),), {})
    assert changed is not None
    (alias,), _ = changed
    assert state.handle.is_full
    y = module_at(model, "0")(alias)
    post_forward(state, model, (alias,), y)
    backward(y.sum())

    assert resting(model)
    z = module_at(plain, "0")(x.detach())
    weight = plain.get_parameter("0.weight")
    assert torch.equal(y, z)
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.sum(0).expand(2, 4))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == sum(p.numel() > 0 for p in module_at(model, "0").parameters())


@pytest.mark.req("S1-38")
def test_forward_and_backward_are_functions_on_a_state(ranks: RankCount) -> None:
    """Pre- and post-forward called with a state, without the module's own forward."""
    ranks(2).run(call_hooks_by_hand)

    for function in (pre_forward, post_forward, finish_task):
        assert not hasattr(function, "__self__")


def count_walks(world: World, path: str) -> list[int]:
    """Walks of the module tree during each of three steps."""
    model = sharded_gpt(path)
    walks = 0
    real = traversal.walk_states

    def spy(module: nn.Module) -> Any:
        nonlocal walks
        walks += 1
        return real(module)

    places: list[Any] = [traversal, root_module]
    for place in places:
        place.walk_states = spy
    per_step = []
    try:
        for step in range(3):
            walks = 0
            backward(loss_of(model, gpt_input(step, world.rank)))
            per_step.append(walks)
    finally:
        for place in places:
            place.walk_states = real
    context = _get_fsdp_states(model)[0].context
    assert context is not None
    assert list(context.handles) == _get_fsdp_handles(model)
    return per_step


@pytest.mark.req("S1-03")
@pytest.mark.parametrize("path", PATHS)
def test_the_tree_is_walked_in_the_first_step_only(ranks: RankCount, path: str) -> None:
    """Lazy initialization walks once; later steps use the root's caches."""
    assert ranks(2).run(count_walks, path) == [[1, 0, 0]] * 2
