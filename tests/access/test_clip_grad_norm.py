"""Norms that are clipped, and scalers: one number and one decision on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.features import flat_parameters
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    averaged_gradients,
    backward,
    gpt_input,
    loss_of,
    sgd,
    wide_input,
)
from tests.support.sharded import both_paths, gpt, message_of, own_gradient, own_parts
from tests.support.world import World

INF = float("inf")
NORMS = (2.0, 1.0, 3.0, INF)

Choose = Callable[[nn.Module], Iterable[Tensor]]


def all_of(model: nn.Module) -> Iterable[Tensor]:
    return model.parameters()


def some_of(model: nn.Module) -> Iterable[Tensor]:
    """A few parameters of two units, as a generator."""
    names = ("head.weight", "blocks.1.up.weight", "blocks.1.up.bias")
    return (p for name, p in model.named_parameters() if name in names)


def one_of(model: nn.Module) -> Tensor:
    return next(p for name, p in model.named_parameters() if name == "head.weight")


def clip_both(
    world: World, model: nn.Module, choose: Choose | None, norm_type: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Norms of ``model`` and the plain one, and the latter's clipped gradients."""
    plain = TinyGPT()
    averaged_gradients(plain, [gpt_input(0, r) for r in range(world.world_size)])
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    chosen = all_of(plain) if choose is None else choose(plain)
    expected = torch.nn.utils.clip_grad_norm_(chosen, 0.1, norm_type)
    norm = clip_grad_norm_(model if choose is None else choose(model), 0.1, norm_type)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return norm, expected, grads


def assert_close(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, (leaf, part) in own_parts(model, expected).items():
        assert torch.allclose(own_gradient(leaf), part, rtol=1e-5, atol=1e-7), name


@pytest.mark.req("D-20")
@pytest.mark.parametrize(
    ("strategy", "choose"),
    [
        *((strategy, None) for strategy in STRATEGIES),
        *((ShardingStrategy.FULL_SHARD, each) for each in (all_of, some_of, one_of)),
    ],
)
@pytest.mark.parametrize("norm_type", NORMS)
@on_ranks(2, 3)
@both_paths
def test_norm_and_gradients_are_those_of_the_plain_model(
    world: World,
    path: str,
    strategy: ShardingStrategy,
    choose: Choose | None,
    norm_type: float,
) -> None:
    """Equal on all ranks, for one all-reduce of one number if anything is cut."""
    model = gpt(path, strategy=strategy)
    with record() as calls:
        norm, expected, grads = clip_both(world, model, choose, norm_type)

    assert norm.shape == ()
    assert torch.allclose(norm, expected, rtol=1e-5)
    assert norm > 0.1
    assert world.all_equal(norm)
    assert_close(model, grads)
    # The infinity norm sends a second number, which tells of a NaN.
    # With two numbers that compare ``max_norm``.
    numel = (4,) if norm_type == INF else (3,)
    sent = [c.numel for c in calls if c.op == "all_reduce" and c.numel == numel]
    assert sent == [numel] * (strategy is not ShardingStrategy.NO_SHARD)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize("bad", [INF, math.nan])
@on_ranks(2)
def test_what_is_not_finite_on_one_rank_is_told_to_all(
    world: World, bad: float, norm_type: float
) -> None:
    """By the norm, or by an error that scales nothing, whichever rank it is on."""
    for rank in range(2):
        model = gpt("composable")
        loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
        if world.rank == rank:
            leaf = next(p for p in model.parameters() if p.numel())
            assert leaf.grad is not None
            leaf.grad.reshape(-1)[0] = bad
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        text = message_of(
            partial(clip_grad_norm_, model, 0.1, norm_type, error_if_nonfinite=True)
        )
        after = [p.grad for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        assert text.startswith("RuntimeError: clip_grad_norm_ expects finite gradients")
        assert f"is {bad} in 1 of its elements (rank {rank}). Skip the step" in text
        norm = clip_grad_norm_(model, 0.1, norm_type)
        assert str(norm.item()) == str(bad)


@both_paths
@on_ranks(2)
def test_without_gradients_the_norm_is_zero(world: World, path: str) -> None:
    """Before the first backward, after ``zero_grad`` and for no parameters at all."""
    model = gpt(path)
    assert clip_grad_norm_(model, 1.0) == 0
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    with record() as calls:
        assert clip_grad_norm_(model, 1.0) == 0
    assert len(calls) == 1
    assert all(p.grad is None for p in model.parameters())
    assert clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "words"),
    [
        *((0.1, each, "a norm_type above 0") for each in (0, -1.0, -INF, math.nan)),
        *((each, 2.0, "a max_norm of 0 or above") for each in (-1.0, -INF, math.nan)),
    ],
)
def test_what_is_no_norm_is_refused(
    one_rank: World, max_norm: float, norm_type: float, words: str
) -> None:
    """Before anything is sent or scaled. Pairs of names and parameters are, too."""
    model = fully_shard(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()

    text = message_of(lambda: clip_grad_norm_(model, max_norm, norm_type))

    assert text.startswith(f"ValueError: clip_grad_norm_ expects {words}")
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    pairs: Any = model.named_parameters()
    text = message_of(lambda: clip_grad_norm_(pairs, 1.0))
    assert text.startswith("TypeError: clip_grad_norm_ expects a module or parameters")
    assert text.endswith("Pass the values, not (name, parameter) pairs.")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@on_ranks(2)
def test_a_norm_whose_square_overflows_stays_finite(
    world: World, norm_type: float
) -> None:
    """As that of the plain model in float64: a finite step is not lost."""
    model, plain = fully_shard(nn.Linear(1, 2)), nn.Linear(1, 2).double()
    for each in (model, plain):
        # The square of each parameter's norm is finite in float32, their sum is not.
        (each(torch.ones(1, 1, dtype=each.weight.dtype)).sum() * 1.2e19).backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)

    norm = clip_grad_norm_(model, 0.5, norm_type, error_if_nonfinite=True)

    assert norm.dtype == torch.float32
    assert math.isclose(norm.item(), want.item(), rel_tol=1e-6)
    own = {n: p.grad.float() for n, p in plain.named_parameters() if p.grad is not None}
    assert_close(model, own)


@pytest.mark.req("X-12")
@pytest.mark.parametrize("norm_type", [2.0, INF])
@on_ranks(3)
def test_ranks_that_clip_to_other_norms_are_refused(
    world: World, norm_type: float
) -> None:
    """On every rank, with its value; nothing is scaled, and clipping goes on."""
    model = fully_shard(nn.Linear(3, 5))
    model(torch.ones(1, 3)).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    own = 0.25 if world.rank == 2 else 0.5
    text = message_of(lambda: clip_grad_norm_(model, own, norm_type))
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))
    clip_grad_norm_(model, 0.5, norm_type)
    assert "DesyncError: clip_grad_norm_ expects the same max_norm" in text
    assert f"on all ranks, got {own} here" in text


@on_ranks(4)
def test_a_nan_of_one_replica_raises_where_it_is_known(world: World) -> None:
    """A reduced one on all ranks, one written after the reduction on its replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(
        tiny_mlp(), device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD
    )
    clip = partial(clip_grad_norm_, model, 1.0, error_if_nonfinite=True)
    for where in ("batch", "gradient", "nowhere"):
        bad = math.nan if world.rank < 2 else 1.0
        loss = model(torch.ones(2, 8)).sum()
        (loss * bad if where == "batch" else loss).backward()
        if where == "gradient":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(bad)
        text = message_of(clip)
        model.zero_grad()

        told = where == "batch" or (where == "gradient" and world.rank < 2)
        assert text.startswith("RuntimeError: " if told else "nothing"), (where, text)
        assert not told or "' is nan in " in text


@pytest.mark.parametrize("norm_type", [2.0, INF])
@on_ranks(3)
def test_plain_parameters_beside_sharded_ones_count_once(
    world: World, norm_type: float
) -> None:
    """What is equal on all ranks is not summed over them."""

    def parts() -> tuple[nn.Module, nn.Module]:
        return tiny_mlp(), tiny_mlp(seed=1)

    plain = nn.Sequential(*parts())
    front, back = parts()
    model = nn.Sequential(fully_shard(front), back)
    inputs = [wide_input(8)(0, rank) for rank in range(world.world_size)]
    averaged_gradients(plain, inputs)
    loss_of(model, inputs[world.rank]).backward()  # type: ignore[no-untyped-call]
    reference = plain[1].parameters()
    for parameter, averaged in zip(back.parameters(), reference, strict=True):
        parameter.grad = averaged.grad.clone() if averaged.grad is not None else None

    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    norm = clip_grad_norm_(model, 0.1, norm_type)

    assert torch.allclose(norm, expected, rtol=1e-5)
    for ours, theirs in zip(back.parameters(), plain[1].parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad)


@on_ranks(2)
def test_gradients_of_frozen_parameters_count(world: World) -> None:
    """As in torch: an optimizer steps on them, too."""
    model, plain = fully_shard(tiny_mlp()), tiny_mlp()
    for each in (model, plain):
        frozen = each[0].get_parameter("weight").requires_grad_(False)
        each(torch.ones(2, 8)).sum().backward()
        frozen.grad = torch.ones_like(frozen)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)

    torch.testing.assert_close(clip_grad_norm_(model, 0.5), want)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert_close(model, grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@on_ranks(2)
def test_a_rank_may_hold_no_element_of_what_is_clipped(
    world: World, dtype: torch.dtype
) -> None:
    """Ranks send a number of one dtype, whatever they hold."""
    model = fully_shard(nn.Linear(4, 1, dtype=dtype))
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()

    norm = clip_grad_norm_([model.bias], 1.0)

    assert norm.item() == 2.0
    assert sorted(world.gather(model.bias.numel())) == [0, 1]


x_of = wide_input(8)


def scaler_of(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, **options)


@pytest.mark.req("B-21", "X-15")
@on_ranks(1, 3)
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("how", ["step", "unscale first"])
@pytest.mark.parametrize("over", [nn.Module.parameters, flat_parameters])
def test_what_one_rank_found_makes_all_skip_and_back_off(
    world: World, over: Callable[[nn.Module], Any], how: str, value: float
) -> None:
    """The second step is skipped and halves the scale; two good ones double it."""
    model = fully_shard(tiny_mlp())
    held = list(over(model))
    optimizer, scaler = sgd(held), scaler_of()
    seen = []
    for at in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        backward(scaler.scale(loss_of(model, x_of(at, world.rank))))
        if at == 1 and world.rank == world.world_size - 1:
            gradient = next(p.grad for p in held if p.numel())
            assert gradient is not None
            gradient[0] = value
        if how == "unscale first":
            scaler.unscale_(optimizer)
        with record() as calls:
            scaler.step(optimizer)
        alone = world.world_size == 1 or how == "unscale first"
        assert [call.op for call in calls] == ["all_reduce"] * (not alone)
        scaler.update()
        optimizer.zero_grad()
        same = all(map(torch.equal, before, model.parameters()))
        seen.append((same, scaler.get_scale()))

    assert seen == [(False, 8.0), (True, 4.0), (False, 4.0), (False, 8.0)]


@pytest.mark.req("B-21")
@on_ranks(3)
def test_half_precision_gradients_and_none_at_all_decide_alike(world: World) -> None:
    """A rank without a gradient learns what the others found, in a group of its own."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = scaler_of(process_group=dist.new_group())
    scaler.scale(torch.ones(()))
    for value, scale in ((8.0, 8.0), (math.inf, 4.0)):
        if world.rank == 0:
            weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [float(world.rank > 0)] * 2
        assert scaler.get_scale() == scale


def test_a_scaled_loss_keeps_its_dtype() -> None:
    """A half precision loss stays one."""
    scaled = scaler_of().scale(torch.ones((), dtype=torch.float16))

    assert scaled.dtype == torch.float16
    assert scaled.item() == 8.0
