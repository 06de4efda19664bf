"""Full parameters that stay beside the shards are never older than the shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    fully_shard,
    get_full_grad,
    unshard,
)
from composable_fsdp.access import set_reshard_after_backward
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import PhaseError
from composable_fsdp.features import flat_parameters
from composable_fsdp.tree.state import _get_module_fsdp_state
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World


def versions(leaves: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in leaves)


@on_ranks(2)
def test_ranks_agree_that_a_parameter_has_another_storage(world: World) -> None:
    """A rank with elements sees the address of before, and one without another one."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    set_reshard_after_backward(model, False)
    for _ in range(2):
        backward(model(torch.ones(2, 4)).sum())
    weight: Any = model[0].weight
    weight.data = torch.from_numpy(weight.data.numpy())

    with record() as calls:
        backward(model(torch.ones(2, 4)).sum())

    # One for each backward, and one for the forward of the unit that has changed.
    assert [call.op for call in calls].count("all_gather") == 3


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
