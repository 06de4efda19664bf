"""Gradients that each rank scaled by a factor of its own, as torch's clipping does."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as torchs
from torch.nn.utils import clip_grad_value_

from composable_fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    PhaseError,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.flat.grad_samples import GRAD_SAMPLES
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, backward, gpt_input, loss_of, wide_input
from tests.support.sharded import RankCount, gpt, message_of
from tests.support.world import World

Change = Callable[[nn.Module, int], object]
"""What a user does to gradients before step ``int``."""
NOTHING = "nothing was raised"


def run(
    model: nn.Module,
    change: Change,
    world: World,
    *,
    steps: int = 6,
    of: Callable[[int, int], Tensor] = gpt_input,
    parameters: Any = None,
    set_to_none: bool = True,
) -> tuple[int, str]:
    """How many steps went well, and what the next one raised."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    for at in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        # Losses of the ranks are far apart, and so are their own norms.
        backward(loss_of(model, of(at, world.rank)))
        change(model, at)
        text = message_of(optimizer.step)
        if text != NOTHING:
            return at, text
    return steps, NOTHING


def clip(model: nn.Module, at: int, most: float = 0.1, **options: Any) -> None:
    torchs(model.parameters(), most, **options)


def late(model: nn.Module, at: int) -> None:
    """Bites at the third step; until then gradients are written and stay the same."""
    torchs(model.parameters(), 0.1 if at == 3 else 1e9)


def after_scaling(model: nn.Module, at: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 4
    torchs(model.parameters(), 0.01)


def one_unit(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
    return fully_shard(model.to(dtype))


def whole_leaves(world: World) -> tuple[int, str]:
    """Each rank holds one of two layers and no part of the other."""
    return run(one_unit(), clip, world, of=wide_input(16))


def half(world: World) -> tuple[int, str]:
    def of(at: int, rank: int) -> Tensor:
        return wide_input(16)(at, rank).bfloat16()

    return run(one_unit(torch.bfloat16), clip, world, of=of)


def check_refused(world: World, path: str) -> list[tuple[int, str]]:
    made = partial(gpt, path)
    bf16 = MixedPrecision(reduce_dtype=torch.bfloat16)
    flat = fully_shard(TinyGPT())
    return [
        run(made(), clip, world),
        run(made(), clip, world, set_to_none=False),
        run(made(), partial(clip, norm_type=1.0), world),
        run(made(), partial(clip, foreach=False), world),
        run(made(), after_scaling, world),
        run(made(mixed_precision=bf16), clip, world),
        run(
            flat,
            lambda _, at: torchs(flat_parameters(flat), 0.1),
            world,
            parameters=flat_parameters(flat),
        ),
        whole_leaves(world),
        half(world),
        run(made(), late, world),
    ]


@pytest.mark.few(1)
@pytest.mark.req("P-13")
@pytest.mark.parametrize("path", PATHS)
def test_torchs_clipping_is_refused_at_the_first_step_that_it_changes(
    ranks: RankCount, path: str
) -> None:
    """On all ranks in one text, whatever the norm, dtype, door and layout."""
    first, second = ranks(2).run(check_refused, path)

    assert first == second
    assert [at for at, _ in first] == [0] * 9 + [3]
    for _, text in first:
        assert re.fullmatch(
            r"CompositionError: SGD got gradients that were scaled after they were "
            r"averaged, (that of '[\w.]+'|all) by [\d.e-]+ on rank 0 and by [\d.e-]+ on"
            r" rank 1; expected one factor on all ranks. torch.nn.utils.clip_grad_norm_"
            r" does that, because it sees this rank's shards alone. Call "
            r"composable_fsdp.clip_grad_norm_\(model, max_norm\) instead, or the "
            r"wrapper's method; where a trainer clips, turn that off there. What is "
            r"meant to differ by rank can be assigned: p.grad = ...",
            text,
        ), text


def ours(model: nn.Module, at: int) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(0.1)
    else:
        clip_grad_norm_(model, 0.1)


def scaled(model: nn.Module, at: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.25)


def by_layer(model: nn.Module, at: int) -> None:
    for factor, parameter in enumerate(model.parameters(), start=1):
        if parameter.grad is not None:
            parameter.grad.div_(factor)


def noisy(model: nn.Module, at: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(torch.rand(parameter.grad.shape))


def by_value(model: nn.Module, at: int) -> None:
    clip_grad_value_(model.parameters(), 1e-3)


def cleared(model: nn.Module, at: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def on_one_rank(model: nn.Module, at: int) -> None:
    leaf = next(p for p in model.parameters() if p.numel())
    if torch.distributed.get_rank() == 0 and leaf.grad is not None:
        leaf.grad.view(-1)[0] = 3.0


def assigned(model: nn.Module, at: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * (1 + torch.distributed.get_rank())


def unchanged(model: nn.Module, at: int) -> None:
    torchs(model.parameters(), 1e9)


ALLOWED = [ours, scaled, by_layer, noisy, by_value, cleared, on_one_rank, assigned]


def check_allowed(world: World, path: str) -> list[tuple[int, str]]:
    found = [run(gpt(path), change, world) for change in ALLOWED]
    found.append(run(gpt(path), unchanged, world))
    plain = gpt(path, strategy=ShardingStrategy.NO_SHARD)
    found.append(run(plain, clip, world))
    found.append(run(one_unit(torch.bfloat16), scaled, world, of=_half_input))
    found.append(run(gpt(path), _scaler(), world))
    return found


def _half_input(at: int, rank: int) -> Tensor:
    return wide_input(16)(at, rank).bfloat16()


def _scaler() -> Change:
    """Unscale, then clip: the first of them is torch's, through our scaler."""

    def change(model: nn.Module, at: int) -> None:
        scaler = ShardedGradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.unscale_(optimizer)
        ours(model, at)

    return change


@pytest.mark.few(1)
@pytest.mark.req("P-13")
@pytest.mark.parametrize("path", PATHS)
def test_other_writes_to_gradients_are_the_users(ranks: RankCount, path: str) -> None:
    """Our clipping, one factor for all, what is no scaling, and what is assigned."""
    for found in ranks(2).run(check_allowed, path):
        assert found == [(6, NOTHING)] * len(found)


def check_quiet(world: World) -> tuple[list[str], list[bool]]:
    model = gpt("composable")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noted = []
    with record() as calls:
        for at in range(40):
            optimizer.zero_grad()
            backward(loss_of(model, gpt_input(at % 4, world.rank)))
            noted.append(bool(GRAD_SAMPLES))
            clip_grad_norm_(model, 0.1)
            optimizer.step()
    return [call.op for call in calls], noted


def test_notes_are_taken_in_a_few_steps_and_send_nothing(ranks: RankCount) -> None:
    """Behind powers of two; a step in between notes nothing."""
    for ops, noted in ranks(2).run(check_quiet):
        assert [at + 1 for at, took in enumerate(noted) if took] == [
            *(1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33)
        ]
        assert ops.count("all_reduce") == 40


class Parts(nn.Module):
    """A layer of which each rank holds rows, and parameters that few ranks hold."""

    def __init__(self, used: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.used = used
        for index, shape in enumerate(shapes):
            value = torch.linspace(0.1, 1, torch.Size(shape).numel()).view(shape)
            self.register_parameter("abcd"[index], nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for name in self.used:
            total = total + (x.mean() * getattr(self, name)).square().sum()
        return total


def check_without_gradients(world: World) -> list[tuple[int, str]]:
    """Models of which some ranks hold nothing, or nothing that has a gradient."""
    models: list[tuple[tuple[str, ...], list[tuple[int, ...]]]] = [
        # Of two rows, three ranks; a few ranks hold all.
        (("a",), [(2, 8)]),
        (("a", "b"), [(1, 8), (8,)]),
        # The first rank holds what is not used, or the last one, or the middle one.
        (("b",), [(8, 8), (16, 8)]),
        (("a",), [(16, 8), (8, 8)]),
        (("a", "c"), [(8, 8), (8, 8), (8, 8)]),
    ]
    found = []
    for used, shapes in models:
        for change in (clip, late, scaled):
            model = fully_shard(Parts(used, *shapes))

            def of(at: int, rank: int) -> Tensor:
                return torch.full((2, 2), 1.0 + at + 10 * rank)

            found.append(run(model, change, world, of=of))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_without_a_gradient_refuse_the_step_with_the_others(
    ranks: RankCount, world_size: int
) -> None:
    """Whatever each rank holds: the same step ends with the same text."""
    found = ranks(world_size).run(check_without_gradients)

    first = found[0]
    assert found == [first] * world_size
    refused = [at for at, text in first if "scaled after they were averaged" in text]
    assert len(refused) >= world_size
    assert all(end == (6, NOTHING) for end in first[2::3])


@on_ranks(2)
def test_models_whose_group_is_gone_are_left_alone(world: World) -> None:
    """Notes of their gradients outlive it; the steps of other models pass them by."""
    group = dist.new_group([0, 1])
    earlier = fully_shard(TinyGPT(), process_group=group)
    backward(loss_of(earlier, gpt_input(0, world.rank)))
    assert GRAD_SAMPLES
    for parameter in earlier.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(PhaseError, match="was destroyed"):
        _ = _get_fsdp_handles(earlier)[0].groups.shard

    steps, text = run(gpt("composable"), late, world)

    assert steps == 3
    assert "on rank 0 and by" in text


def clip_another_model(other: nn.Module, model: nn.Module, at: int) -> None:
    """This package clips another model after the user's write to this one."""
    torchs(model.parameters(), 0.1)
    clip_grad_norm_(other, 1.0)


def scale_then_clip(model: nn.Module, at: int) -> None:
    """This package clips gradients that each rank has scaled by another factor."""
    torchs(model.parameters(), 0.1)
    clip_grad_norm_(model, 1e-3)


@pytest.mark.req("P-13")
@on_ranks(2)
@pytest.mark.parametrize("path", PATHS)
def test_clipping_by_this_package_hides_no_write_before(
    world: World, path: str
) -> None:
    """Of the same model, nor of another model of the process."""
    other = gpt(path)
    backward(loss_of(other, gpt_input(0, world.rank)))

    for change in (partial(clip_another_model, other), scale_then_clip):
        at, text = run(gpt(path), change, world)

        assert at == 0
        assert "gradients that were scaled" in text


@pytest.mark.req("P-13")
@on_ranks(2)
def test_clipping_takes_samples_of_its_own_gradients_alone(world: World) -> None:
    """Of another model, of fake tensors say, a sample stays as it is."""
    other, model = gpt("composable"), gpt("composable")
    for each in (other, model):
        backward(loss_of(each, gpt_input(0, world.rank)))
    notes = list(GRAD_SAMPLES.items())
    mine = {id(p) for p in model.parameters()}

    clip_grad_norm_(model, 1e-3)

    for region, note in notes:
        is_mine = any(id(leaf) in mine for leaf in region.leaves)
        assert (GRAD_SAMPLES[region] is note) is not is_mine
