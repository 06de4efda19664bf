"""Claims on clipping the norm of gradients that are cut over ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_full_grad,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import TinyGPT, build, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.reference import (
    STRATEGIES,
    apply_units,
    averaged_gradients,
    gpt_input,
    loss_of,
    wide_input,
)
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
    one_to_three_ranks,
    own_gradient,
    own_parts,
)
from tests.support.world import World

INF = float("inf")
NORMS = (2.0, 1.0, 3.0, INF)
every_norm = pytest.mark.parametrize("norm_type", NORMS)

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


def check_norm(
    world: World,
    path: str,
    strategy: ShardingStrategy,
    norm_type: float,
    choose: Choose | None,
) -> None:
    model = gpt(path, strategy=strategy)
    with record() as calls:
        norm, expected, grads = clip_both(world, model, choose, norm_type)

    assert norm.shape == ()
    assert torch.allclose(norm, expected, rtol=1e-5)
    assert norm > 0.1
    assert world.all_equal(norm)
    assert_close(model, grads)
    sharded = world.world_size > 1 and strategy is not ShardingStrategy.NO_SHARD
    # The infinity norm sends a second number, which tells of a NaN.
    # With two numbers that compare ``max_norm``.
    numel = (4,) if norm_type == INF else (3,)
    sent = [c.numel for c in calls if c.op == "all_reduce" and c.numel == numel]
    assert sent == [numel] * sharded


@pytest.mark.few
@pytest.mark.parametrize(
    ("strategy", "norm_type"),
    [(ShardingStrategy.FULL_SHARD, norm_type) for norm_type in NORMS]
    + [
        (strategy, norm_type) for strategy in STRATEGIES[1:] for norm_type in (2.0, INF)
    ],
)
@one_to_three_ranks
@both_paths
def test_norm_and_gradients_are_those_of_the_plain_model(
    ranks: RankCount,
    path: str,
    strategy: ShardingStrategy,
    world_size: int,
    norm_type: float,
) -> None:
    """Equal on all ranks, for one all-reduce of one number if anything is cut."""
    ranks(world_size).run(check_norm, path, strategy, norm_type, None)


@pytest.mark.req("D-20")
@pytest.mark.parametrize("norm_type", [3.0, INF])
@one_to_three_ranks
@both_paths
@pytest.mark.parametrize("choose", [all_of, some_of, one_of])
def test_parameters_can_be_given_instead_of_the_module(
    ranks: RankCount, path: str, choose: Choose, world_size: int, norm_type: float
) -> None:
    """A list, a generator or one tensor: only those count and only those are scaled."""
    strategy = ShardingStrategy.FULL_SHARD
    ranks(world_size).run(check_norm, path, strategy, norm_type, choose)


@on_ranks(1, 2, 3)
@both_paths
def test_a_norm_below_the_limit_leaves_every_bit(world: World, path: str) -> None:
    """Through the function and through the wrapper's method."""
    model = gpt(path)
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    if isinstance(model, FullyShardedDataParallel):
        norm = model.clip_grad_norm_(1e6)
    else:
        norm = clip_grad_norm_(model, 1e6)

    assert 0 < norm < 1e6
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def check_broken(world: World, bad: float, rank: int, norm_type: float) -> list[float]:
    model = gpt("composable")
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    if world.rank == rank:
        leaf = next(p for p in model.parameters() if p.numel())
        assert leaf.grad is not None
        leaf.grad.reshape(-1)[0] = bad
    norm = clip_grad_norm_(model, 0.1, norm_type)
    values = [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
    return [norm.item(), *values]


@pytest.mark.parametrize(
    ("norm_type", "rank"),
    [
        (2.0, 0),
        (2.0, 1),
        (1.0, 1),
        (INF, 0),
        (INF, 1),
    ],
)
def test_nan_on_one_rank_is_nan_on_all(
    ranks: RankCount, norm_type: float, rank: int
) -> None:
    """Every rank sees that the step is lost, whichever rank it comes from."""
    nan = float("nan")
    for norm, *values in ranks(2).run(check_broken, nan, rank, norm_type):
        assert norm != norm
        assert all(value != value or value == 0.0 for value in values)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize("rank", [0, 1])
def test_infinity_on_one_rank_is_infinity_on_all(
    ranks: RankCount, norm_type: float, rank: int
) -> None:
    """As with NaN: the norm says so everywhere."""
    for norm, *_ in ranks(2).run(check_broken, INF, rank, norm_type):
        assert norm == INF


@every_norm
@on_ranks(1, 2, 3)
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


NONE_FOUND = "found no gradient on this rank"


def check_nothing(world: World, path: str) -> list[float]:
    model = gpt(path)
    with pytest.warns(UserWarning, match=NONE_FOUND):
        early = clip_grad_norm_(model, 1.0)
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    with record() as calls, pytest.warns(UserWarning, match=NONE_FOUND):
        late = clip_grad_norm_(model, 1.0)
    nobody = clip_grad_norm_([], 1.0)

    assert len(calls) == (world.world_size > 1)
    assert all(p.grad is None for p in model.parameters())
    return [early.item(), late.item(), nobody.item()]


@one_to_three_ranks
@both_paths
def test_without_gradients_the_norm_is_zero(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """Before the first backward, after ``zero_grad`` and for no parameters at all."""
    assert ranks(world_size).run(check_nothing, path) == [[0.0] * 3] * world_size


DTYPES = ModelRecipe(
    ModuleRecipe(
        "plain",
        children=(
            ModuleRecipe("linear", dtype="bfloat16"),
            ModuleRecipe("mlp"),
            ModuleRecipe("tiny", dtype="bfloat16"),
            ModuleRecipe("scalar", dtype="float64"),
        ),
    ),
    width=4,
)


@every_norm
@on_ranks(1, 2, 3)
@both_paths
def test_gradients_of_several_dtypes_have_one_norm(
    world: World, path: str, norm_type: float
) -> None:
    """bfloat16, float32 and float64 together, each scaled in its own dtype."""
    model, plain = apply_units(build(DTYPES), ["block_1"], path=path), build(DTYPES)
    inputs = [wide_input(4)(0, rank) for rank in range(world.world_size)]
    averaged_gradients(plain, inputs)
    loss_of(model, inputs[world.rank]).backward()  # type: ignore[no-untyped-call]
    dtypes = [p.grad.dtype for p in model.parameters() if p.grad is not None]

    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    norm = clip_grad_norm_(model, 0.1, norm_type)

    assert torch.allclose(norm.double(), expected.double(), rtol=2e-2)
    assert world.all_equal(norm)
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == dtypes
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        leaf, part = own_parts(
            model, {**dict(plain.named_parameters()), name: parameter.grad}
        )[name]
        ours = own_gradient(leaf)
        assert torch.allclose(ours.double(), part.double(), rtol=3e-2, atol=1e-4)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str
)
@on_ranks(2)
def test_a_rank_may_hold_no_element_of_what_is_clipped(
    world: World, dtype: torch.dtype
) -> None:
    """Ranks send a number of one dtype, whatever they hold."""
    model = fully_shard(nn.Linear(4, 1, dtype=dtype))
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()

    norm = clip_grad_norm_([model.bias], 1.0)

    assert norm.item() == 2.0
    held = [h.leaves[1].numel() for h in _get_fsdp_handles(model)]
    assert world.gather(held) == [[1], [0]] or world.gather(held) == [[0], [1]]


def test_pairs_of_names_and_parameters_are_refused() -> None:
    """The message says what to pass."""
    pairs: Any = nn.Linear(2, 2).named_parameters()

    text = message_of(lambda: clip_grad_norm_(pairs, 1.0))

    assert text == (
        "TypeError: clip_grad_norm_ expects a module or parameters, got an iterable "
        "with a tuple. Pass the values, not (name, parameter) pairs."
    )


@pytest.mark.parametrize("norm_type", [0, -1.0, -INF, float("nan")])
def test_what_is_no_norm_is_refused(one_rank: World, norm_type: float) -> None:
    """Before anything is sent or scaled; padding has no part in the others."""
    model = fully_shard(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()

    text = message_of(lambda: clip_grad_norm_(model, 0.1, norm_type))

    assert text == (
        "ValueError: clip_grad_norm_ expects a norm_type above 0 (2.0, 1.0, inf), got "
        f"{float(norm_type)}. Norms below that do not grow with the gradients."
    )
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(2, 3))


def freeze_some(model: nn.Module) -> None:
    """All biases of one unit, and all of another."""
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.0.") or name == "blocks.1.up.bias":
            parameter.requires_grad_(False)


@pytest.mark.req("P-13")
@pytest.mark.parametrize("norm_type", [2.0, INF])
@on_ranks(1, 2, 3)
@both_paths
def test_frozen_parameters_with_a_gradient_count(
    world: World, path: str, norm_type: float
) -> None:
    """An optimizer steps on what they kept from before, and so it is clipped."""
    model, plain = gpt(path), TinyGPT()
    averaged_gradients(plain, [gpt_input(0, r) for r in range(world.world_size)])
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    for each in (model, plain):
        freeze_some(each)
        # The regions follow at the next forward, and keep the gradients.
        with torch.no_grad():
            loss_of(each, gpt_input(0, world.rank))

    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    with record() as calls:
        norm = clip_grad_norm_(model, 0.1, norm_type)

    assert torch.allclose(norm, expected, rtol=1e-5)
    assert len(calls) == (world.world_size > 1)
    held = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert len(held) == len(list(plain.parameters()))
    assert_close(model, held)


def check_options(world: World) -> None:
    model = gpt("wrapper")
    assert isinstance(model, FullyShardedDataParallel)
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    many = model.clip_grad_norm_(0.1, 2.0, error_if_nonfinite=True, foreach=True)
    clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    held = [p for p in model.parameters() if p.numel()]
    for leaf, value in zip(held, before, strict=True):
        leaf.grad = value.clone()
    single = model.clip_grad_norm_(0.1, 2.0, foreach=False)

    torch.testing.assert_close(single, many)
    after = [p.grad for p in held]
    torch.testing.assert_close(after, clipped)
    assert any(not torch.equal(a, b) for a, b in zip(clipped, before, strict=True))


@one_to_three_ranks
def test_options_are_those_of_torchs_function(
    ranks: RankCount, world_size: int
) -> None:
    """Also by position, and on the wrapper; one by one gives what ``foreach`` gives."""
    names = list(inspect.signature(torch.nn.utils.clip_grad_norm_).parameters)[1:]
    assert list(inspect.signature(clip_grad_norm_).parameters)[1:] == names
    method = inspect.signature(FullyShardedDataParallel.clip_grad_norm_)
    assert list(method.parameters)[1:] == names
    ranks(world_size).run(check_options)


def check_nonfinite(world: World, bad: float) -> str:
    model = gpt("composable")
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    if world.rank == 1:
        leaf = next(p for p in model.parameters() if p.numel())
        assert leaf.grad is not None
        leaf.grad.reshape(-1)[0] = bad
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    text = message_of(lambda: clip_grad_norm_(model, 0.1, error_if_nonfinite=True))
    after = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    return text


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_error_if_nonfinite_raises_on_all_ranks_and_scales_nothing(
    ranks: RankCount, bad: float
) -> None:
    """What is on one rank is known to all."""
    expected = (
        "RuntimeError: clip_grad_norm_ expects finite gradients "
        "(error_if_nonfinite=True), and their norm of order 2.0 over all ranks is "
        f"{bad}. 'positions.weight' is {bad} in 1 of its elements (rank 1). Skip the "
        "step, or pass error_if_nonfinite=False."
    )
    assert ranks(2).run(check_nonfinite, bad) == [expected] * 2


@pytest.mark.parametrize("max_norm", [-1.0, -INF, float("nan")])
def test_a_negative_limit_is_refused(one_rank: World, max_norm: float) -> None:
    """It would turn the step around."""
    model = fully_shard(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()

    text = message_of(lambda: clip_grad_norm_(model, max_norm))

    assert text == (
        f"ValueError: clip_grad_norm_ expects a max_norm of 0 or above, got {max_norm}."
        " A negative one would turn every gradient around."
    )
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(2, 3))


def clip_to_own(world: World, norm_type: float) -> tuple[str, bool]:
    """Clip to a norm that the last rank alone has; the error, and whether gradients
    are as before."""
    model = fully_shard(nn.Linear(3, 5))
    model(torch.ones(1, 3)).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    own = 0.25 if world.rank == world.world_size - 1 else 0.5
    text = message_of(lambda: clip_grad_norm_(model, own, norm_type))
    after = [p.grad for p in model.parameters() if p.grad is not None]
    unchanged = all(map(torch.equal, before, after))
    clip_grad_norm_(model, 0.5, norm_type)
    return text, unchanged


@pytest.mark.req("X-12")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_clip_to_other_norms_are_refused(
    ranks: RankCount, norm_type: float, world_size: int
) -> None:
    """On every rank, with the values; nothing is scaled, and clipping goes on."""
    told = ", ".join(f"0.5 on rank {rank}" for rank in range(world_size - 1))
    for text, unchanged in ranks(world_size).run(clip_to_own, norm_type):
        assert unchanged
        assert "DesyncError: clip_grad_norm_ expects the same max_norm" in text
        assert f"got {told}, 0.25 on rank {world_size - 1}. " in text


@both_paths
@on_ranks(2)
def test_to_clip_without_any_gradient_warns(world: World, path: str) -> None:
    """As FSDP1: before backward, or after zero_grad, nothing is clipped."""
    if path == "wrapper":
        model = FullyShardedDataParallel(tiny_mlp())
        with pytest.warns(UserWarning, match=NONE_FOUND):
            model.clip_grad_norm_(1.0)
    # A rank that holds nothing of a parameter never has a gradient of it.
    small = apply_units(nn.Linear(1, 1, bias=False), [], path=path)
    small(torch.ones(1, 1)).sum().backward()
    clip_grad_norm_(small, 1.0)


class Complex(nn.Module):
    """A complex parameter, whose gradient is complex."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(1.0, 7.0, dtype=torch.float64)
        self.weight = nn.Parameter(torch.complex(values, -values).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """A real loss."""
        return (self.weight * x).abs().square().sum()


@on_ranks(2)
def test_complex_gradients_are_clipped_as_the_plain_models(world: World) -> None:
    """In the precision of their real and imaginary parts."""
    for dtype in (torch.complex64, torch.complex128):
        for norm in NORMS:
            plain, model = Complex(dtype), fully_shard(Complex(dtype))
            for each in (plain, model):
                each(torch.ones(6)).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm)
            total = clip_grad_norm_(model, 0.5, norm)
            assert torch.allclose(total.double(), expected.double())
            whole = get_full_grad(model, "weight")
            assert whole is not None
            assert plain.weight.grad is not None
            assert torch.allclose(whole, plain.weight.grad)
