"""Unusual orders of forward and backward have the unsharded model's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy
from composable_fsdp.errors import PhaseError
from composable_fsdp.features import flat_parameters
from composable_fsdp.flat.region import part_of
from composable_fsdp.naming import join_name
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.corners import CORNERS, UNITS, WIDTH, Chain, Corner
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    apply_units,
    assert_same_training,
    backward,
)
from tests.support.sharded import own_gradient
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Gradients = dict[str, Tensor | None]


def average(corner: Corner, plain: Chain, inputs: list[Tensor]) -> list[Gradients]:
    """Gradients of the plain model: per rank, and their mean at the end."""
    per_rank: list[Gradients] = []
    for x in inputs:
        plain.zero_grad()
        corner(plain, x)
        per_rank.append({n: p.grad for n, p in plain.named_parameters()})
    return per_rank


def require_equal(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Bit by bit, or within a tolerance."""
    apart = (got.double() - expected.double()).abs().max().item() if got.numel() else 0
    assert torch.equal(got, expected) or apart <= tolerance, (name, apart)


def require_gradients(
    model: nn.Module, per_rank: list[Gradients], tolerance: float
) -> None:
    """Each leaf has its part of the mean, or none where the plain model has none."""
    for handle in _get_fsdp_handles(model):
        for region in handle.layout.regions:
            slots = zip(region.layout.parameters, region.leaves, strict=True)
            for slot, leaf in slots:
                name = join_name(handle.full_fqn, slot.fqn)
                values = [
                    g for gradients in per_rank if (g := gradients[name]) is not None
                ]
                if not values:
                    assert leaf.grad is None, name
                    continue
                mean = torch.stack(values).sum(0) / len(values)
                part = part_of(region, slot, mean, like=leaf)
                require_equal(name, own_gradient(leaf), part, tolerance)


def turn(world: World, strategy: ShardingStrategy, corner_name: str) -> None:
    """The corner twice: with one input on both ranks, then with inputs that differ."""
    corner = CORNERS[corner_name]
    plain = Chain()
    model = apply_units(copy.deepcopy(plain), UNITS, strategy=strategy)
    for turn, apart in enumerate((0.0, 1.0)):
        generator = torch.Generator().manual_seed(turn)
        x = torch.randn(3, WIDTH, generator=generator)
        inputs = [x + apart * rank for rank in range(world.world_size)]
        # Bit by bit where both ranks have one input: the mean of equal numbers.
        tolerance = 1e-6 if apart else 0.0
        values = corner(model, inputs[world.rank])

        expected = corner(plain, inputs[world.rank])
        for i, (mine, theirs) in enumerate(zip(values, expected, strict=True)):
            require_equal(f"value {i}", mine, theirs, tolerance)
        require_gradients(model, average(corner, plain, inputs), tolerance)
        for p in model.parameters():
            p.grad = None
        for handle in _get_fsdp_handles(model):
            assert handle.residency is Residency.SHARDED
            assert handle.phase is Phase.IDLE
            assert not handle.running.calls
            assert handle.backward.open_calls == handle.backward.pending == 0
            assert not handle.reduction.due


@pytest.mark.req("B-11", "B-18", "D-11")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=lambda s: s.name)
@pytest.mark.parametrize("corner", CORNERS)
def test_values_and_gradients_are_those_of_the_unsharded_model(
    ranks: RankCount, corner: str, strategy: ShardingStrategy
) -> None:
    """Outputs, parameters' and inputs' gradients, bit by bit; the units rest after."""
    ranks(2).run(turn, strategy, corner)


# ---- gradients with respect to chosen parameters ----

BLOCKS = ("0", "1", "2")


class Residual(nn.Module):
    """A block whose second derivatives are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


def pair(
    path: str, strategy: ShardingStrategy, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A plain model, and the same one sharded."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Residual() for _ in BLOCKS), nn.Linear(WIDTH, 1))
    model = apply_units(
        copy.deepcopy(plain), BLOCKS, path=path, strategy=strategy, **options
    )
    return plain, model


POINTS = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def scalar(model: nn.Module, x: Tensor) -> Tensor:
    """A loss."""
    loss: Tensor = model(x).square().sum()
    return loss


def chosen(model: nn.Module) -> list[nn.Parameter]:
    """Some parameters of every unit."""
    return [p for n, p in model.named_parameters() if "weight" in n and "norm" not in n]


@pytest.mark.req("P-09")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2)
def test_autograd_grad_of_sharded_parameters_is_refused_by_name(
    world: World, graph: bool, flat: bool
) -> None:
    """On every rank before anything runs, never zeros; the next step is right."""
    plain, model = pair("composable", ShardingStrategy.FULL_SHARD)
    asked = list(flat_parameters(model)) if flat else chosen(model)
    loss = scalar(model, POINTS)

    with pytest.raises(PhaseError) as caught:
        torch.autograd.grad(loss, [POINTS, *asked], create_graph=graph)

    name = "a flat parameter" if flat else "'0.layer.weight'"
    assert f"gradient of sharded parameter {name}, of which" in str(caught.value)
    assert "backward(inputs=[...])" in str(caught.value)
    backward(loss)
    backward(scalar(plain, POINTS))
    torch.optim.SGD(asked if flat else model.parameters(), lr=0.1).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_training(model, plain, [], [], tolerance=1e-6)
