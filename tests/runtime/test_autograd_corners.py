"""Unusual orders of forward and backward have the unsharded model's numbers."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.flat.region import part_of
from composable_fsdp.naming import join_name
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.corners import CORNERS, UNITS, WIDTH, Chain, Corner
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, STRATEGIES, apply_units
from tests.support.sharded import own_gradient
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Gradients = dict[str, Tensor | None]

FROZEN: dict[str, tuple[str, ...]] = {
    "all train": (),
    "a unit is frozen": ("b.linear.weight", "b.linear.bias"),
    "some are frozen": ("a.linear.weight", "c.linear.bias", "scale"),
}


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


def require_rest(model: nn.Module) -> None:
    """Nothing of the step is left in memory, and sharded leaves are shown."""
    for handle in _get_fsdp_handles(model):
        assert [
            handle.is_full,
            handle.residency is not Residency.SHARDED,
            handle.running.calls,
        ] == [False, False, []]
        assert handle.phase is Phase.IDLE, handle
        assert handle.backward.open_calls == handle.backward.pending == 0, handle
        assert not handle.reduction.due, handle


def turn(
    world: World,
    path: str,
    strategy: ShardingStrategy,
    corner_name: str,
    frozen: tuple[str, ...],
    mode: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE,
) -> None:
    """The corner three times: one input on both ranks, then inputs that differ."""
    corner = CORNERS[corner_name]
    plain = Chain()
    for name in frozen:
        plain.get_parameter(name).requires_grad_(False)
    inner = copy.deepcopy(plain)
    model = apply_units(
        inner, UNITS, path=path, strategy=strategy, backward_prefetch=mode
    )
    target = model if path == "composable" else _Through(model)
    for turn, apart in enumerate((0.0, 0.0, 1.0)):
        generator = torch.Generator().manual_seed(turn)
        x = torch.randn(3, WIDTH, generator=generator)
        inputs = [x + apart * rank for rank in range(world.world_size)]
        # Bit by bit where both ranks have one input: the mean of equal numbers.
        tolerance = 1e-6 if apart else 0.0
        values = corner(target, inputs[world.rank])

        expected = corner(plain, inputs[world.rank])
        for i, (mine, theirs) in enumerate(zip(values, expected, strict=True)):
            require_equal(f"value {i}", mine, theirs, tolerance)
        require_gradients(model, average(corner, plain, inputs), tolerance)
        for p in model.parameters():
            p.grad = None
        require_rest(model)


class _Through:
    """Sets attributes of the module that a wrapper holds."""

    def __init__(self, wrapper: nn.Module) -> None:
        vars(self)["wrapper"] = wrapper

    def __call__(self, *args: object, **kwargs: object) -> object:
        return vars(self)["wrapper"](*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        found = getattr(vars(self)["wrapper"], name)
        return _Through(found) if name in UNITS else found

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["wrapper"].module, name, value)


@pytest.mark.req("B-11", "B-18")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("corner", CORNERS)
def test_values_and_gradients_are_those_of_the_unsharded_model(
    ranks: RankCount, corner: str, path: str
) -> None:
    """Outputs, parameters' and inputs' gradients, bit by bit; the units rest after."""
    ranks(2).run(turn, path, STRATEGIES[0], corner, FROZEN["all train"])


@pytest.mark.few(12)
@pytest.mark.req("B-11")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("frozen", ["a unit is frozen", "some are frozen"])
@pytest.mark.parametrize("corner", CORNERS)
def test_gradients_pass_through_frozen_parameters(
    ranks: RankCount, corner: str, frozen: str
) -> None:
    """Inputs of a frozen unit get theirs; frozen parameters get none."""
    ranks(2).run(turn, PATHS[0], STRATEGIES[0], corner, FROZEN[frozen])


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("corner", CORNERS)
def test_a_reduction_behind_the_next_all_gather_makes_no_difference(
    ranks: RankCount, corner: str
) -> None:
    """With BACKWARD_POST a unit reduces when its inputs are done, and where none of
    them will tell, when its gradients are there."""
    post = BackwardPrefetch.BACKWARD_POST
    ranks(2).run(turn, PATHS[0], STRATEGIES[0], corner, FROZEN["all train"], post)


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=lambda s: s.name)
@pytest.mark.parametrize("corner", CORNERS)
def test_weights_that_stay_full_make_no_difference(
    ranks: RankCount, corner: str, strategy: ShardingStrategy
) -> None:
    """SHARD_GRAD_OP keeps weights between forward and backward, NO_SHARD always."""
    ranks(2).run(turn, PATHS[0], strategy, corner, FROZEN["all train"])


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(()))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
}


@on_ranks(2)
def test_transforms_of_inputs_are_those_of_the_plain_model(world: World) -> None:
    """Where shards are gathered, and where they are cast or copied before."""
    with warnings.catch_warnings():
        # Torch's first jvp compiles by a function that is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(world.rank))
    half = MixedPrecision(param_dtype=torch.bfloat16)
    kinds: list[tuple[dict[str, Any], float]] = [
        ({}, 1e-6),
        ({"cpu_offload": CPUOffload(offload_params=True)}, 1e-6),
        ({"mixed_precision": half}, 0.05),
    ]
    for options, tolerance in kinds:
        plain = tiny_mlp()
        model = apply_units(copy.deepcopy(plain), ["0", "2"], **options)
        for name, transform in TRANSFORMS.items():

            def value(z: Tensor, model: nn.Module = model) -> Tensor:
                total: Tensor = model(z).float().square().sum()
                return total

            ours, theirs = (
                transform(value, x),
                transform(partial(value, model=plain), x),
            )
            assert torch.allclose(ours.float(), theirs, atol=tolerance), name
