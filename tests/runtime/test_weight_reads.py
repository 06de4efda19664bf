"""Weights are read between the wait for their all-gather and the reshard, or not.

The ways by which tensors leave a unit are forms of `property_tests`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    FSDPError,
    ShardingStrategy,
    fully_shard,
    no_sync,
    reshard,
    unshard,
    unshard_params,
)
from composable_fsdp.access import set_reduce_scatter_unused_params
from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.errors import PhaseError
from composable_fsdp.features import flat_parameters
from tests.runtime.parity import trains_as
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    assert_same_training,
    backward,
    loss_of,
    wide_input,
)
from tests.support.world import World

WIDTH = 8


class Escapes(nn.Module):
    """Hands a tensor to a place where nobody looks."""

    def __init__(
        self,
        read: Callable[[Tensor, Tensor], Tensor],
        keep: Callable[[Tensor], object],
    ) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.read, self.keep = read, keep

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self.read(x, self.gain).sum())
        return x * 1.0


class Function(torch.autograd.Function):
    """Keeps its weight where autograd does not look at versions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0], grads[0] * x


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, w: x * w,
    "div": lambda x, w: x / w,
    "pow": lambda x, w: w.square() * x,
    "prelu": lambda x, w: torch.nn.functional.prelu(x, w),
    "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (WIDTH,), w),
    "mv": lambda x, w: x @ w,
    "function": Function.apply,
}


@pytest.mark.req("P-01")
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, None])
@on_ranks(2)
def test_a_read_outside_the_window_names_the_parameter_and_the_way_out(
    world: World, prefetch: BackwardPrefetch | None
) -> None:
    """Never freed memory, never memory that an all-gather is writing; the next step is
    right."""
    for read, function in READS.items():
        place: list[Tensor] = []
        escapes = Escapes(function, place.append)
        torch.manual_seed(0)
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        model = nn.Sequential(first, escapes, last)
        apply_units(model, ["1"], backward_prefetch=prefetch)
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(world.rank))
        model(x)
        with pytest.raises(FSDPError) as caught:
            backward(place[0])

        text = str(caught.value)
        assert "sharded" in text
        assert "Return the tensor from the forward" in text
        assert "'1.gain'" in text or read == "function"
        model.zero_grad()
        backward(model(x).square().mean())


# ---- units that give out their own weights ----


class Early(nn.Module):
    """Reads the weight of its last unit before the first one runs."""

    def __init__(self, gather: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.gather, self.first, self.last = gather, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.gather(self.last)
        penalty = self.last.weight.square().sum()
        return torch.as_tensor(self.last(self.first(x).tanh()) + penalty)


@on_ranks(2)
def test_a_gradient_that_comes_after_its_unit_was_reduced_is_reduced(
    world: World,
) -> None:
    """With zeros for unused parameters backward reduces ``last`` on its way."""
    torch.manual_seed(0)
    plain = Early(lambda _: None)
    model = copy.deepcopy(plain)
    model.gather = unshard
    apply_units(model, ["first", "last"], strategy=ShardingStrategy.SHARD_GRAD_OP)
    set_reduce_scatter_unused_params(model, True)

    trains_as(world, model, plain, wide_input(4), tolerance=1e-6)


# ---- weights that are kept ----


@on_ranks(1, 2)
def test_a_reparametrization_of_shards_is_not_removed(world: World) -> None:
    """``remove_weight_norm`` would read beyond this rank's rows."""
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(8, 8))
    model = fully_shard(nn.Sequential(layer, nn.Linear(8, 3)))
    model(torch.ones(1, 8))

    with pytest.raises(PhaseError, match="Remove it before fully_shard"):
        nn.utils.remove_weight_norm(layer)


@pytest.mark.req("R-08")
@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("end", ["reshard", "forward", "no_grad"])
@on_ranks(1, 2)
def test_a_parameter_kept_from_unshard_shows_the_shard(
    world: World, end: str, strategy: str
) -> None:
    """Also if a forward or a backward reshards; training is that of a plain model."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    whole = plain[0].weight.detach().clone()
    model = copy.deepcopy(plain)
    fully_shard(model[0], strategy=ShardingStrategy[strategy])
    fully_shard(model, strategy=ShardingStrategy[strategy])
    x = torch.ones(1, 8)
    for step in range(3):
        for each in (plain, model):
            if each is model and step < 2:
                unshard(model[0])
                kept, view = model[0].weight, model[0].weight.detach()
                assert view.shape == (8, 8)
            if each is model and end == "reshard":
                reshard(model[0])
            if each is model and end == "no_grad":
                with torch.no_grad():
                    model(x)
            backward(each(x).sum())
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            each.zero_grad()
        assert torch.equal(kept, model[0].weight)
        # Without ranks to gather from, a view is one of the shard.
        if step == 0 and end == "reshard" and world.world_size > 1:
            assert torch.equal(view, whole)

    with unshard_params(model):
        assert torch.equal(model[0].weight, plain[0].weight)


class Keeper(nn.Module):
    """A layer that keeps views of its weight on attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer.weight.detach()
        self.cache["row"] = self.layer.weight.data[0]
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("between", ["nothing", "reshard", "forward"])
@on_ranks(2)
def test_a_graph_may_be_run_again_after_a_parameter_was_kept(
    world: World, between: str
) -> None:
    """Also if one rank alone has kept it, and whatever reshards between."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    for _ in range(3):
        unshard(model[0])
        kept = model[0].weight if world.rank == 0 else None
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            loss = each(torch.ones(1, 8)).square().sum()
            loss.backward(retain_graph=True)
            if between == "forward":
                each(torch.zeros(1, 8))
            elif between == "reshard" and each is model:
                reshard(model[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if kept is not None:
            assert torch.equal(kept, model[0].weight)

    with unshard_params(model):
        assert torch.allclose(model[0].weight, plain[0].weight)


@on_ranks(1, 2)
def test_a_view_of_a_weight_on_an_attribute_is_copied(world: World) -> None:
    """In the first forwards and later, as the output of a forward is."""
    torch.manual_seed(0)
    keeper = Keeper()
    whole, cache = keeper.layer.weight.detach().clone(), keeper.cache
    model = apply_units(nn.Sequential(keeper, nn.Linear(8, 3)), ["0"])
    for index in range(6):
        with torch.set_grad_enabled(index % 2 == 0):
            out = model(torch.ones(1, 8))
        assert torch.equal(keeper.last, whole)
        assert torch.equal(cache["row"], whole[0])
        if out.requires_grad:
            backward(out.sum())


@on_ranks(2)
def test_a_view_that_a_raising_first_forward_kept_is_copied(world: World) -> None:
    """The unit is sharded after the raise, and the attribute keeps the whole weight."""
    keeper = Keeper()
    whole = keeper.layer.weight.detach().clone()
    model = apply_units(nn.Sequential(keeper, nn.Linear(8, 3)), ["0"])
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 7))  # of another width

    assert torch.equal(keeper.last, whole)
    assert torch.equal(keeper.cache["row"], whole[0])


class Residual(nn.Module):
    """A block whose second derivatives are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


@pytest.mark.req("P-09")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2)
def test_autograd_grad_of_sharded_parameters_is_refused_by_name(
    world: World, graph: bool, flat: bool
) -> None:
    """On every rank before anything runs, never zeros; the next step is right."""
    torch.manual_seed(0)
    plain = nn.Sequential(Residual(), Residual(), nn.Linear(WIDTH, 1))
    model = apply_units(copy.deepcopy(plain), ("0", "1"))
    asked = list(flat_parameters(model) if flat else model.parameters())
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    loss = model(x).square().sum()

    with pytest.raises(PhaseError) as caught:
        torch.autograd.grad(loss, [x, *asked], create_graph=graph)

    name = "the flat parameter of '" if flat else "'"
    assert f"asked for the gradient of {name}" in str(caught.value)
    with pytest.raises(PhaseError, match="backward by inputs"):
        torch.autograd.backward(loss, inputs=asked)
    backward(loss)
    backward(plain(x).square().sum())
    for parameters in (asked, plain.parameters()):
        torch.optim.SGD(parameters, lr=0.1).step()
    assert_same_training(model, plain, [], [], tolerance=1e-6)


# ---- gradients where a rank holds nothing, and in the memory of weights ----


@pytest.mark.req("B-16")
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(3)
def test_hooks_are_shown_an_empty_gradient_while_they_run(
    world: World, offload: bool
) -> None:
    """As often as on other ranks, because a hook may send something."""
    layers = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3))
    model = apply_units(layers, ["0"], cpu_offload=CPUOffload(offload))
    seen: list[bool] = []

    def see(leaf: Tensor) -> None:
        assert leaf.grad is not None
        seen.append(leaf.grad.shape == leaf.shape)

    hooked: list[Any] = list(model.parameters())
    for parameter in hooked:
        parameter.register_post_accumulate_grad_hook(see)
    for at in (0, 1):
        backward(loss_of(model, wide_input(4)(at, world.rank)))

    assert seen == [True] * 2 * len(hooked)
    assert all((p.grad is None) == (not p.numel()) for p in hooked)


X = torch.linspace(0.5, 1.0, 8) * torch.tensor([[1.0], [-1.0]])
"""Two rows, one the negative of the other: no unit is dead for both."""


class _ReturnsTheWeight(torch.autograd.Function):
    """The gradient of ``weight`` is the memory of the other weight, which it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (other,) = ctx.saved_tensors
        return gradient, other.detach(), None


class _Penalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, 64))
        self.frozen = nn.Parameter(torch.linspace(2.0, 3.0, 64), requires_grad=False)
        self.saved = "weight"

    def forward(self, x: Tensor) -> Tensor:
        other = getattr(self, self.saved)
        out: Tensor = _ReturnsTheWeight.apply(x, self.weight, other)  # type: ignore[no-untyped-call]  # untyped in torch
        return out


@pytest.mark.parametrize("saved", ["weight", "frozen"])
@on_ranks(2)
def test_a_gradient_may_be_the_memory_of_the_weights(world: World, saved: str) -> None:
    """It waits until they were freed, also those of another region."""
    penalty = _Penalty()
    penalty.saved = saved
    model = nn.Sequential(nn.Linear(8, 8), penalty)
    fully_shard(penalty)
    fully_shard(model)
    backward(model(X).sum())
    with no_sync(model):
        backward(model(X).sum())
    backward(model(X).sum())
    expected = 3 * penalty.get_parameter(saved).detach()
    torch.testing.assert_close(penalty.weight.grad, expected)
