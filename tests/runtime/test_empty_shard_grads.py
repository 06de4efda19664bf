"""Gradients where a rank holds nothing of a parameter: there is none, as with FSDP1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    clip_grad_norm_,
    fully_shard,
    get_full_grad,
    no_sync,
    set_full_grad,
    set_reduce_scatter_unused_params,
    unshard_params,
)
from composable_fsdp.optim.names import is_absent
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    averaged_gradients,
    backward,
    gradients_of,
    loss_of,
    wide_input,
)
from tests.support.world import World

INPUT = wide_input(4)


class Narrow(nn.Module):
    """One row, one element, no dimension, no element, and few elements in all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) + 1.5)

        self.row, self.out = nn.Linear(4, 1), nn.Linear(1, 3)
        for linear in (self.row, self.out):
            linear.weight = drawn(*linear.weight.shape)
            linear.bias = drawn(*linear.bias.shape)
        self.scale, self.shift, self.nothing = drawn(), drawn(1), drawn(0)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.row(x * self.scale) + self.shift + self.nothing.sum()
        out: Tensor = self.out(hidden)
        return out


def narrow(path: str, seed: int = 0, **options: Any) -> nn.Module:
    """``Narrow`` of three units: of one row, of one column, and the rest."""
    return apply_units(Narrow(seed), ["row", "out"], path=path, **options)


def once(world: World, model: nn.Module, at: int = 0) -> None:
    """Forward and backward on this rank's input."""
    backward(loss_of(model, INPUT(at, world.rank)))


def expected(world: World, *steps: int) -> dict[str, Tensor]:
    """The plain model's sums over ``steps`` of the mean gradients over ranks."""
    sums: dict[str, Tensor] = {}
    for at in steps:
        inputs = [INPUT(at, rank) for rank in range(world.world_size)]
        for name, value in gradients_of(Narrow(), inputs).items():
            sums[name] = sums[name] + value if name in sums else value.clone()
    return sums


def assert_gradients(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    """None exactly where nothing is held, and the plain model's as a whole."""
    for (name, leaf), whole in zip(
        model.named_parameters(), wanted.values(), strict=True
    ):
        assert is_absent(leaf) == (whole.numel() > 0 == leaf.numel()), name
        assert (leaf.grad is None) == is_absent(leaf), name
        found = get_full_grad(model, name)
        assert found is not None, name
        torch.testing.assert_close(found, whole, msg=name)


def reduced_once(world: World, path: str) -> nn.Module:
    model = narrow(path)
    once(world, model)
    assert_gradients(model, expected(world, 0))
    return model


def accumulated(world: World, path: str) -> nn.Module:
    model = narrow(path)
    with no_sync(model):
        once(world, model, 0)
    for at in (1, 2):
        once(world, model, at)
    assert_gradients(model, expected(world, 0, 1, 2))
    return model


def own_tensors(world: World, path: str) -> nn.Module:
    """Sums go into tensors of the user's, and one that is empty is taken away."""
    model = narrow(path)
    for leaf in model.parameters():
        leaf.grad = torch.zeros_like(leaf)
    once(world, model)
    assert_gradients(model, expected(world, 0))
    return model


def penalised(world: World, path: str) -> nn.Module:
    """The loss uses the sharded parameters beside their units."""
    model = narrow(path)
    once(world, model)
    penalty = torch.stack([p.sum() for p in model.parameters()]).sum()
    backward(penalty + loss_of(model, INPUT(1, world.rank)))
    wanted = {name: value + 1 for name, value in expected(world, 0, 1).items()}
    for (name, leaf), whole in zip(
        model.named_parameters(), wanted.values(), strict=True
    ):
        found = get_full_grad(model, name)
        assert found is not None
        torch.testing.assert_close(found, whole, msg=name)
        if is_absent(leaf):
            leaf.grad = None  # autograd's own
    return model


def offloaded(world: World, path: str) -> nn.Module:
    model = narrow(path, cpu_offload=CPUOffload(True))
    for at in (0, 1):
        once(world, model, at)
    assert_gradients(model, expected(world, 0, 1))
    return model


def shown_and_set(world: World, path: str) -> nn.Module:
    """Blocks that show whole gradients, and gradients by name, take them back alike."""
    model = narrow(path)
    once(world, model)
    wanted = expected(world, 0)
    with unshard_params(model, with_grads=True):
        for parameter, whole in zip(model.parameters(), wanted.values(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, whole)
            parameter.grad.mul_(2)
    for name in wanted:
        wanted[name] = wanted[name] * 2
    set_full_grad(model, "scale", torch.tensor(5.0))
    wanted["scale"] = torch.tensor(5.0)
    assert_gradients(model, wanted)
    set_full_grad(model, "scale", None)
    assert get_full_grad(model, "scale") is None
    set_full_grad(model, "scale", torch.tensor(5.0))
    assert_gradients(model, wanted)
    return model


def frozen_and_back(world: World, path: str) -> nn.Module:
    """Regions made anew keep them so."""
    model = narrow(path)
    once(world, model)
    model.get_parameter("shift").requires_grad_(False)
    with torch.no_grad():
        model(INPUT(0, world.rank))
    assert_gradients(model, expected(world, 0))
    model.get_parameter("shift").requires_grad_(True)
    once(world, model, 1)
    assert_gradients(model, expected(world, 0, 1))
    return model


PROGRAMS = (
    reduced_once,
    accumulated,
    own_tensors,
    penalised,
    offloaded,
    shown_and_set,
    frozen_and_back,
)


def assert_idioms(model: nn.Module) -> None:
    """What scripts do with gradients; nothing is NaN and nothing raises."""
    held = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
    for gradient in held:
        assert gradient.abs().max() >= gradient.mean()
    if held:
        assert torch.stack([gradient.norm() for gradient in held]).isfinite().all()


@pytest.mark.req("P-03")
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2, 3)
def test_grad_is_none_exactly_where_nothing_is_held(
    world: World, program: Callable[[World, str], nn.Module]
) -> None:
    """And the gradient as a whole is the plain model's, asked for on every rank."""
    for path in PATHS:
        model = program(world, path)
        assert sum(map(is_absent, model.parameters())) > 0
        assert_idioms(model)
        model.zero_grad()
        once(world, model)
        assert_gradients(model, expected(world, 0))


@on_ranks(3)
def test_gradients_of_zeros_are_none_there_too(world: World) -> None:
    """Whatever part of the model each rank used."""
    model = fully_shard(Narrow())
    set_reduce_scatter_unused_params(model, True)
    backward(model(INPUT(0, world.rank))[:, 0].sum() * (world.rank == 0))

    assert [p.grad is None for p in model.parameters()] == [
        is_absent(p) for p in model.parameters()
    ]


def watch(parameter: Any, name: str, seen: list[tuple[str, torch.Size]]) -> None:
    def see(leaf: Tensor) -> None:
        assert leaf.grad is not None
        seen.append((name, leaf.grad.shape))

    parameter.register_post_accumulate_grad_hook(see)


@pytest.mark.req("B-16")
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(3)
def test_hooks_are_shown_an_empty_gradient_while_they_run(
    world: World, offload: bool
) -> None:
    """As often as on other ranks, because a hook may send something."""
    for path in PATHS:
        model = narrow(path, cpu_offload=CPUOffload(offload))
        seen: list[tuple[str, torch.Size]] = []
        for name, parameter in model.named_parameters():
            watch(parameter, name, seen)
        for at in (0, 1):
            once(world, model, at)

        shapes = {name: p.shape for name, p in model.named_parameters()}
        assert len(seen) == 2 * len(shapes)
        assert all(shapes[name] == shape for name, shape in seen)
        assert_gradients(model, expected(world, 0, 1))


@on_ranks(2, 3)
def test_clipping_counts_what_other_ranks_hold_and_warns_of_nothing(
    world: World,
) -> None:
    """A warning on a rank without gradients of its own would be an error here."""
    for path in PATHS:
        model, plain = narrow(path), Narrow()
        once(world, model)
        averaged_gradients(plain, [INPUT(0, r) for r in range(world.world_size)])
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(model, 0.1), theirs)
        torch.testing.assert_close(
            clip_grad_norm_(model, 1.0), torch.tensor(0.1), rtol=1e-4, atol=1e-5
        )
        # Of one rank alone; and another has elements without a gradient.
        model.zero_grad()
        set_full_grad(model, "scale", torch.tensor(3.0))
        norm = clip_grad_norm_(model, 10.0)
        torch.testing.assert_close(norm, torch.tensor(3.0))
