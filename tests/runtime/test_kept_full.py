"""Full parameters that stay beside the shards are never older than the shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    ShardingStrategy,
    fully_shard,
    get_full_grad,
    no_sync,
    reshard,
    unshard,
)
from composable_fsdp.errors import CompositionError, PhaseError, PlanError
from composable_fsdp.features import flat_parameters
from composable_fsdp.tree.state import _get_module_fsdp_state
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    assert_same_training,
    backward,
    differences,
    wide_input,
)
from tests.support.world import World


def versions(leaves: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in leaves)


@on_ranks(2)
def test_an_evaluation_before_the_step_sees_values_that_no_version_shows(
    world: World,
) -> None:
    """Averaged weights are often swapped in through ``.data``."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    model = fully_shard(copy.deepcopy(plain), strategy=ShardingStrategy.ZERO1)
    with no_sync(model):  # a reduction counts as a step
        backward(model(torch.ones(2, 4)).sum())
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(2)

    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


def test_a_step_of_a_flat_parameter_makes_a_graph_old(one_rank: World) -> None:
    """The versions of the leaves do not move with it."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(flat_parameters(model), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    backward(model(x).sum())
    loss = model(x).sum()
    optimizer.step()

    with pytest.raises(PhaseError, match="an optimizer step"):
        backward(loss)


@on_ranks(2)
def test_what_a_graph_has_saved_is_unreadable_while_an_all_gather_writes_it(
    world: World,
) -> None:
    """The second backward of a graph reads the memory that the unit has kept."""
    model = fully_shard(nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    state = _get_module_fsdp_state(model)
    assert state is not None
    form = state.handle.form
    assert versions(form.placed) != form.unreadable

    pending = unshard(model, async_op=True)

    assert versions(form.placed) == form.unreadable
    assert pending is not None
    pending.wait()


@on_ranks(2)
def test_a_gradient_of_the_output_of_a_unit_is_differentiated_again(
    world: World,
) -> None:
    """Where the next unit begins, after another forward and backward."""
    found: list[dict[str, Any]] = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        )
        names = [name for name, _ in model.named_parameters()]
        for each in (*model, model) if sharded else ():
            fully_shard(each)
        inner: list[Tensor] = []
        model[0].register_forward_hook(lambda *call, kept=inner: kept.append(call[2]))
        for _ in range(3):
            x = torch.linspace(-1, 1, 8).view(2, 4)
            loss = model(x).square().sum()
            (grad,) = torch.autograd.grad(loss, inner[-1], create_graph=True)
            backward(model(x).sum())
            backward(grad.square().sum())
        of = get_full_grad if sharded else lambda m, name: m.get_parameter(name).grad
        found.append({name: of(model, name) for name in names})
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("shown", [False, True])
def test_a_parameter_frozen_in_backward_gets_no_gradient(
    one_rank: World, shown: bool
) -> None:
    """As in the plain model, whether the program froze what it or the module holds."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        own = list(model[0].parameters())
        if sharded:
            fully_shard(model)

        def freeze(_: Tensor, model: Any = model, own: Any = own) -> None:
            (model[0].weight if shown else own[0]).requires_grad_(False)

        def hook(_: nn.Module, args: object, out: Any, freeze: Any = freeze) -> None:
            out.register_hook(freeze)

        model[0].register_forward_hook(hook)
        backward(model(torch.ones(2, 3)).sum())
        found.append([p.grad for p in own])

    (weight, bias), (own_weight, own_bias) = found
    assert weight is own_weight is None
    assert torch.equal(bias, own_bias)


# ---- weights in the place of a unit's, and writes to weights ----

WIDTH = 6


@pytest.mark.req("P-07")
@pytest.mark.parametrize("unsharded", [False, True])
@pytest.mark.parametrize("where", ["root", "unit", "inside"])
@on_ranks(1, 2)
def test_functional_call_on_a_unit_is_refused_by_name(
    world: World, where: str, unsharded: bool
) -> None:
    """And leaves the model as it was, with no leaf that was freed."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model: Any = apply_units(copy.deepcopy(plain), ["0", "1"])
    x = torch.ones(2, WIDTH)
    model(x)
    if unsharded:
        unshard(model)
    called, name = (model, "1.bias") if where == "root" else (model[1], "bias")
    call = partial(torch.func.functional_call, called, {name: torch.ones(WIDTH)}, (x,))

    hook = model[0].register_forward_hook(lambda *_: call())
    with pytest.raises((CompositionError, PlanError), match=r"'1.bias'"):
        model(x) if where == "inside" else call()
    hook.remove()

    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.untyped_storage().nbytes() or not parameter.numel()
    torch.testing.assert_close(model(x), plain(x))
    reshard(model)
    assert_same_training(model, plain, [], [], tolerance=0)


class MayClamp(nn.Module):
    """Clips its weight through ``.data``, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            self.layer.weight.data.clamp_(-0.2, 0.2)
        return x + torch.tanh(self.layer(x))


@on_ranks(2)
def test_a_deep_copy_knows_of_writes_through_data(world: World) -> None:
    """Also if its own first forwards, which compare all values, write nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(MayClamp() for _ in range(3)), nn.Linear(WIDTH, 2))
    model = apply_units(copy.deepcopy(plain), ("0", "1", "2"))
    x = wide_input(WIDTH)(0, 0)
    with torch.no_grad():
        for _ in range(3):
            plain(x), model(x)
        copies = copy.deepcopy(plain), copy.deepcopy(model)
        for each in copies:
            for on in (False, False, False, True):
                for layer in each.children():
                    if isinstance(layer, MayClamp):
                        layer.on = on
                for parameter in each.parameters():
                    parameter.mul_(2.0)
                each(x)

    assert differences(copies[1].state_dict(), copies[0].state_dict()) == {}


@on_ranks(2)
def test_a_backward_for_full_parameters_gives_their_shards_gradients(
    world: World,
) -> None:
    """And none to the others."""
    model = fully_shard(nn.Linear(4, 4))
    unshard(model)
    weight = model.weight

    model(torch.ones(2, 4)).sum().backward(inputs=[weight])

    torch.testing.assert_close(get_full_grad(model, "weight"), torch.full((4, 4), 2.0))
    assert get_full_grad(model, "bias") is None
