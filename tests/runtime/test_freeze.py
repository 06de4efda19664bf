"""Claims on parameters that are frozen or unfrozen after the model was sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    set_is_last_backward,
)
from composable_fsdp.comm.call_records import CallRecord
from composable_fsdp.comm.collectives import record
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.naming import join_name
from composable_fsdp.planning.unit_costs import traffic_of
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
)
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
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


@pytest.mark.req("U-01", "S2-11")
@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_freezing_and_unfreezing_trains_as_the_plain_model(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """With AdamW's state kept, bit by bit at one and two ranks."""
    model = TinyGPT()
    set_frozen(model, SCHEDULE[0])
    plain = copy.deepcopy(model)
    sharded = apply_units(model, gpt_units(model), path=path, strategy=strategy)
    ours, theirs = adamw(sharded.parameters()), adamw(plain.parameters())
    objects = list(map(id, sharded.parameters()))
    tolerance = tolerance_at(world.world_size)

    for at, frozen in enumerate(SCHEDULE):
        set_frozen(sharded, frozen)
        set_frozen(plain, frozen)
        inputs = [gpt_input(at, rank) for rank in range(world.world_size)]
        expected = averaged_gradients(plain, inputs)
        loss = loss_of(sharded, inputs[world.rank])
        backward(loss)
        theirs.step()
        ours.step()
        ours.zero_grad()

        assert abs(loss.item() - expected[world.rank]) <= tolerance
        found = differences(sharded.state_dict(), plain.state_dict())
        assert all(value <= tolerance for value in found.values()), (at, found)
    assert list(map(id, sharded.parameters())) == objects


def reduced(calls: list[CallRecord]) -> int:
    return sum(c.nbytes for c in calls if c.op == "reduce_scatter")


def check_bytes(world: World) -> dict[str, int]:
    model = gpt("composable")
    found = {}
    for label, frozen in (
        ("all train", lambda name: False),
        ("biases", lambda name: "bias" not in name),
        ("one matrix", lambda name: name != "blocks.0.up.weight"),
        ("all again", lambda name: False),
    ):
        set_frozen(model, frozen)
        loss = loss_of(model, gpt_input(0, world.rank))
        with record() as calls:
            backward(loss)
        plans = [s.handle.layout.plan for s in _get_fsdp_states(model)]
        traffic = [traffic_of(p, is_root=False, in_backward=True) for p in plans]
        assert reduced(calls) == sum(t.reduce_scatter_bytes for t in traffic)
        frozen_regions = [
            region
            for s in _get_fsdp_states(model)
            for region in s.handle.layout.regions
            if not region.layout.trainable
        ]
        assert not any(isinstance(r, TrainableRegion) for r in frozen_regions)
        found[label] = reduced(calls)
    return found


@pytest.mark.req("U-01", "D-09")
def test_what_is_reduced_follows_what_is_trained(ranks: RankCount) -> None:
    """The plan tells the bytes, frozen regions have no buffer, and back is back."""
    found = ranks(2).run(check_bytes)[0]

    assert found["all again"] == found["all train"]
    assert found["biases"] < found["all train"] / 4
    # Rows of the matrix are on both ranks, or on one: twice its size at most.
    assert found["one matrix"] <= 2 * 32 * 8 * 4


class Lora(nn.Module):
    """A frozen bfloat16 layer with a float32 adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x.bfloat16()).float() + self.up(self.down(x))
        return y


@pytest.mark.req("U-01")
@on_ranks(2)
def test_adapters_reduce_their_bytes_and_the_base_its_own_once_it_trains(
    world: World,
) -> None:
    """No padding of one with the other, and the plain model's bits."""
    torch.manual_seed(3)
    model = nn.Sequential(Lora(), nn.Tanh(), Lora())
    plain = copy.deepcopy(model)
    for unit in (model[0], model[2], model):
        fully_shard(unit)
    ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
    sent = []

    for at in range(4):
        if at == 2:
            for each in (model, plain):
                each.requires_grad_(True)
        batches = [
            torch.randn(2, 12, generator=torch.Generator().manual_seed(at * 9 + rank))
            for rank in range(world.world_size)
        ]
        averaged_gradients(plain, batches)
        loss = loss_of(model, batches[world.rank])
        with record() as calls:
            backward(loss)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        sent.append(reduced(calls))

    adapters = 2 * (24 + 24) * 4
    base = 2 * 144 * 2
    assert sent == [adapters, adapters, adapters + base, adapters + base]
    assert differences(model.state_dict(), plain.state_dict()) == {}


@on_ranks(2)
def test_gradients_survive_the_move_and_accumulate_on(world: World) -> None:
    """Of frozen parameters they stay as they are."""
    model = gpt("composable")
    backward(loss_of(model, gpt_input(0, world.rank)))
    before = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }

    set_frozen(model, lambda name: "bias" in name)
    with torch.no_grad():
        model(gpt_input(1, world.rank))
    after = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    backward(loss_of(model, gpt_input(1, world.rank)))

    other = gpt("composable")
    for at in range(2):
        backward(loss_of(other, gpt_input(at, world.rank)))
    for (name, one), two in zip(
        model.named_parameters(), other.parameters(), strict=True
    ):
        assert (one.grad is None) == (two.grad is None) == (not one.numel())
        expected = before.get(name) if "bias" in name else two.grad
        torch.testing.assert_close(one.grad, expected)


def check_modes(world: World, mixed: MixedPrecision | None) -> None:
    model = gpt("composable", mixed_precision=mixed)
    set_frozen(model, SCHEDULE[0])
    model.eval()
    with torch.inference_mode():
        model(gpt_input(0, world.rank))
    model.train()
    backward(loss_of(model, gpt_input(0, world.rank)))

    for name, parameter in model.named_parameters():
        is_absent = not parameter.numel()
        assert (parameter.grad is None) == ("bias" in name or is_absent), name


@pytest.mark.parametrize("mixed", [False, True])
def test_the_move_may_come_in_inference_mode(ranks: RankCount, mixed: bool) -> None:
    """Evaluation after a change, then training."""
    precision = MixedPrecision(param_dtype=torch.bfloat16) if mixed else None
    ranks(2).run(check_modes, precision)


@on_ranks(2)
def test_offloaded_parameters_move_and_have_their_hooks_called(world: World) -> None:
    """Bit by bit the plain model, and each hook once."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    apply_units(model, gpt_units(model), cpu_offload=CPUOffload(True))
    seen: list[str] = []
    for name, parameter in model.named_parameters():

        def see(leaf: Tensor, name: str = name) -> None:
            assert leaf.grad is not None
            seen.append(name)

        parameter.register_post_accumulate_grad_hook(see)  # type: ignore[no-untyped-call]
    ours, theirs = adamw(model.parameters()), adamw(plain.parameters())

    for at, frozen in enumerate(SCHEDULE):
        set_frozen(model, frozen)
        set_frozen(plain, frozen)
        inputs = [gpt_input(at, rank) for rank in range(world.world_size)]
        averaged_gradients(plain, inputs)
        seen.clear()
        backward(loss_of(model, inputs[world.rank]))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()

        trained = [n for n, p in plain.named_parameters() if p.requires_grad]
        assert sorted(seen) == sorted(trained)
        assert differences(model.state_dict(), plain.state_dict()) == {}


@on_ranks(2)
def test_gradients_on_their_way_to_the_host_survive_the_move(world: World) -> None:
    """The backward was not the last one, so nobody has waited for the copies."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    apply_units(model, gpt_units(model), cpu_offload=CPUOffload(True))
    inputs = [gpt_input(0, rank) for rank in range(world.world_size)]
    averaged_gradients(plain, inputs)
    set_is_last_backward(model, False)
    backward(loss_of(model, inputs[world.rank]))

    set_frozen(model, SCHEDULE[0])
    with torch.no_grad():
        model(inputs[world.rank])
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), 1.0).step()

    assert differences(model.state_dict(), plain.state_dict()) == {}


@on_ranks(2)
def test_states_are_saved_and_loaded_across_the_move(world: World) -> None:
    """Model and optimizer, from one arrangement into another."""
    model, again = gpt("composable"), gpt("composable", seed=1)
    ours = adamw(model.parameters())
    for frozen in (SCHEDULE[1], SCHEDULE[2]):
        set_frozen(model, frozen)
        backward(loss_of(model, gpt_input(0, world.rank)))
        ours.step()
        ours.zero_grad()

    other = adamw(again.parameters())
    set_frozen(again, SCHEDULE[4])
    loss_of(again, gpt_input(0, world.rank))
    again.load_state_dict(model.state_dict())
    saved = optim_state_dict(model, ours)
    optim_state_dict_to_load(again, other, saved, load_directly=True)

    assert differences(again.state_dict(), model.state_dict()) == {}
    for name, values in optim_state_dict(again, other)["state"].items():
        for key, value in values.items():
            assert torch.equal(value, saved["state"][name][key]), join_name(name, key)


def check_refusals(world: World) -> list[str]:
    model = gpt("composable")
    with no_sync(model):
        backward(loss_of(model, gpt_input(0, world.rank)))
    set_frozen(model, SCHEDULE[0])
    waiting = message_of(lambda: loss_of(model, gpt_input(0, world.rank)))

    model = gpt("composable")
    old = loss_of(model, gpt_input(0, world.rank))
    model.double()
    loss_of(model, gpt_input(0, world.rank))
    stale = message_of(lambda: backward(old))

    model.zero_grad()
    old = loss_of(model, gpt_input(0, world.rank))
    set_frozen(model, SCHEDULE[0])
    new = loss_of(model, gpt_input(0, world.rank))
    with no_sync(model):
        backward(new)
        local = message_of(lambda: backward(old))
    model.zero_grad()
    backward(loss_of(model, gpt_input(0, world.rank)))
    return [waiting, stale, local]


def test_changes_whose_gradients_would_be_lost_are_refused(ranks: RankCount) -> None:
    """And training goes on."""
    waiting, *stale = ranks(2).run(check_refusals)[0]

    assert waiting == (
        "PhaseError: requires_grad of parameters of unit (root) was changed while its "
        "gradients wait to be reduced (no_sync, set_requires_gradient_sync or "
        "set_requires_all_reduce). Freeze and unfreeze after the backward that reduces."
    )
    for text in stale:
        assert text == (
            "PhaseError: Backward reached unit (root) through a forward that ran "
            "before the unit's parameters were cast, moved or replaced (or frozen or "
            "unfrozen, and now gradients of no_sync wait). Run backward before the "
            "next forward, or change parameters between steps."
        )


class Shift(nn.Module):
    """Hands its result to nobody but a list."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.other = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor, found: Callable[[Tensor], None]) -> Tensor:
        found(x + self.shift)
        return x


@on_ranks(1, 2)
def test_a_gradient_that_leaves_unseen_for_an_earlier_layout_is_refused(
    world: World,
) -> None:
    """The gradient would go to a buffer that nobody reduces."""
    model, found = Shift(), list[Tensor]()
    fully_shard(model)
    for frozen in (False, True):
        model.other.requires_grad_(not frozen)
        model(torch.ones(3), found.append)

    text = message_of(lambda: backward(found[0].sum()))

    assert text.startswith(
        "PhaseError: Backward reached a parameter of shape (3,) through a forward that "
        "ran before"
    )
    assert model.shift.grad is None
