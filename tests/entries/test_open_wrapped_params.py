"""Frozen parameters that wrap tensors are sharded through the tensors inside.

The other side is the model that still has them, unsharded.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    checkpoint,
    fully_shard,
    load,
    no_sync,
    open_wrapped_params,
    plan,
    save,
    unshard_params,
)
from composable_fsdp.errors import CompositionError, PlanError
from tests.storage.test_wrappers import Forgetful, Rows
from tests.support.on_ranks import on_ranks
from tests.support.place import World
from tests.support.recording import record_steps
from tests.support.reference import (
    adamw,
    backward,
    loss_of,
    mean_of_summed_grads,
    tolerance_at,
    train,
    train_reference,
    wide_input,
)

WIDTH = 16


class Adapted(nn.Module):
    """A frozen matrix of integers with scales, and a trainable pair beside."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(-9, 9, (WIDTH, WIDTH), generator=generator)
        scale = torch.rand(WIDTH, 1, generator=generator) * 0.1
        rows = Rows(codes.to(torch.int8), scale, 8)
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, WIDTH, generator=generator))
        self.up = nn.Parameter(torch.randn(WIDTH, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        base: Any = self.weight
        matrix: Tensor = base.codes.float() * base.scale
        result: Tensor = x + x @ matrix.t() + x @ self.down.t() @ self.up.t()
        return result


def plain(seed: int = 0) -> nn.Sequential:
    """Three blocks; equal arguments give equal values."""
    return nn.Sequential(*[Adapted(seed + each) for each in range(3)])


def opened(seed: int = 0, **options: Any) -> nn.Sequential:
    """The same, sharded, a unit per block."""
    model = plain(seed)
    open_wrapped_params(model)
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def trainable(parameters: Any) -> torch.optim.Optimizer:
    """AdamW of the adapters."""
    return adamw(p for p in parameters if p.requires_grad)


def full(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters. Collective: gathers."""
    with unshard_params(model, writeback=False):
        return {n: p.detach().clone() for n, p in model.named_parameters()}


STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


@pytest.mark.req("M-04")
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2, 4)
def test_adapters_train_as_beside_whole_quantized_weights(
    world: World, strategy: ShardingStrategy
) -> None:
    """Losses, adapters; and the integers and scales do not change."""
    reference, model = plain(), opened(strategy=strategy)
    before = full(model)
    data = wide_input(WIDTH)
    expected = train_reference(reference, world.world_size, data, trainable)

    losses = train(model, world.rank, data, trainable)

    found, tolerance = full(model), tolerance_at(world.world_size)
    own = torch.tensor([step[world.rank] for step in expected])
    assert torch.allclose(torch.tensor(losses), own, rtol=tolerance, atol=0)
    for name, value in reference.named_parameters():
        if value.requires_grad:
            assert torch.allclose(found[name], value, rtol=0, atol=tolerance), name
    inside = [name for name in found if ".weight." in name]
    assert len(inside) == 6
    assert all(torch.equal(found[name], before[name]) for name in inside)


@pytest.mark.req("M-04")
@on_ranks(1, 2)
def test_tensors_inside_are_divided_over_ranks_and_sent_as_planned(
    world: World,
) -> None:
    """Integers as integers: the plan's bytes are those of the collectives."""
    model, size, x = plain(), world.world_size, wide_input(WIDTH)(0, world.rank)
    policy = ModuleWrapPolicy({Adapted})
    open_wrapped_params(model)
    planned = plan(model, world_size=size, policy=policy)
    fully_shard(model, policy=policy)
    backward(loss_of(model, x))

    with record_steps() as calls:
        backward(loss_of(model, x))

    sent = sum(call.nbytes for call in calls if call.op.startswith("all_gather"))
    assert sent == (planned.traffic.all_gather_bytes if size > 1 else 0)
    frozen = [r for unit in planned.units for r in unit.regions if not r.trainable]
    assert {r.dtype for r in frozen} == {torch.int8, torch.float32}
    held = world.gather(model[0].get_parameter("weight.codes").numel())
    assert sum(held) == WIDTH * WIDTH
    assert size == 1 or max(held) < WIDTH * WIDTH


@pytest.mark.req("M-04")
@on_ranks(2)
def test_no_sync_and_checkpointing_keep_gradients(world: World) -> None:
    """A recomputed forward shows the wrapper again."""
    model, reference, data = plain(), plain(), wide_input(WIDTH)
    open_wrapped_params(model)
    for index in range(3):
        # The hooks of the module that owns the wrapper run again.
        model[index] = fully_shard(checkpoint(nn.Sequential(model[index])))
    fully_shard(model)
    with no_sync(model):
        backward(loss_of(model, data(0, world.rank)))
    backward(loss_of(model, data(1, world.rank)))

    expected = mean_of_summed_grads(reference, data)
    with unshard_params(model, with_grads=True):
        found = [p.grad for p in model.parameters() if p.requires_grad]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert torch.equal(ours, theirs)


@pytest.mark.req("M-04")
@on_ranks(1, 2)
def test_state_goes_into_another_model(world: World, tmp_path: Path) -> None:
    """Through save and load, a full state dict, and a deep copy."""
    model, data = opened(), wide_input(WIDTH)
    optimizer = trainable(model.parameters())
    backward(loss_of(model, data(0, world.rank)))
    optimizer.step()
    optimizer.zero_grad()
    expected = full(model)
    save(tmp_path / "new", model, optimizer)
    again, other = opened(seed=7), opened(seed=8)

    load(tmp_path / "new", again, trainable(again.parameters()))
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)

    for each in (again, other, copied):
        found = full(each)
        assert list(found) == list(expected)
        assert all(torch.equal(found[n], expected[n]) for n in expected)
        x = data(1, world.rank)
        assert torch.equal(loss_of(each, x), loss_of(model, x))


@pytest.mark.req("M-04")
def test_a_cast_of_scales_is_refused_before_it_counts(one_rank: World) -> None:
    """The text names the tensor and the setting."""
    half = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = opened(mixed_precision=half)

    with pytest.raises(PlanError, match=r"'scale' inside of a Rows.*expected torch.fl"):
        model(wide_input(WIDTH)(0, 0))


@pytest.mark.req("M-04")
def test_checkpoint_of_the_owner_itself_is_refused(one_rank: World) -> None:
    """At the forward, as its recomputation would find no wrapper."""
    model = open_wrapped_params(plain())
    checkpoint(model.get_submodule("0"))

    with pytest.raises(CompositionError, match="Apply checkpoint to the module that"):
        model(wide_input(WIDTH)(0, 0))


def trained(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(
        Rows(torch.ones(4, 4), torch.ones(4, 1), 8), requires_grad=True
    )


def forgetful(model: nn.Sequential) -> None:
    codes = torch.ones(4, 4, dtype=torch.int8)
    kept = Forgetful(codes, torch.ones(4, 1), 8)
    model[1].weight = nn.Parameter(kept, requires_grad=False)


def nested(model: nn.Sequential) -> None:
    inner = Rows(torch.ones(4, 4), torch.ones(4, 1), 8)
    kept = Rows(torch.ones(4, 4), inner, 8)
    model[1].weight = nn.Parameter(kept, requires_grad=False)


def tied(model: nn.Sequential) -> None:
    model[1].weight = model[0].weight


@pytest.mark.req("M-06")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (trained, "'1.weight', a Rows, is trainable"),
        (forgetful, "'1.weight', a Forgetful, has a Tensor as 'floats'"),
        (nested, "'1.weight', a Rows, has a Rows as 'scale'"),
        (tied, "'1.weight', a Rows, is '0.weight' as well"),
    ],
)
def test_a_wrapper_that_cannot_be_opened_is_refused(change: Any, text: str) -> None:
    """By name; no parameter of the module is replaced."""
    model = plain()
    change(model)
    before = dict(model.named_parameters(remove_duplicate=False))

    with pytest.raises(PlanError) as caught:
        open_wrapped_params(model)

    assert text in str(caught.value)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
