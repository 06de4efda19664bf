"""Experts on a mesh of their own: ranks hold other experts, all have data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

from composable_fsdp import (
    clip_grad_norm_,
    fully_shard,
    get_full_grad,
    get_full_param,
    load,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
)
from composable_fsdp.errors import (
    CheckpointError,
    CompositionError,
    DesyncError,
)
from composable_fsdp.features import find_nonfinite
from tests.parallel.experts import (
    Model,
    Recipe,
    batch,
    layers_of,
    local,
    loss_of,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World

MIXTRAL = Recipe()
SHARED = Recipe(top=1, shared=True, starved=True)


def data_of(mesh: DeviceMesh) -> DeviceMesh:
    return mesh._flatten("dp")


def pair(recipe: Recipe, world: World, **options: Any) -> tuple[Model, Model]:
    """Return the sharded model of divided experts, and the plain model."""
    mesh = recipe.mesh(world)
    model = recipe.sharded(mesh["ep"], mesh["edp"], data_of(mesh), **options)
    return model, recipe.plain()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def step_gradients(model: nn.Module, plain: nn.Module, world: World, step: int) -> None:
    """Leave the gradients of a step in both; the losses must be equal."""
    loss = loss_of(model, batch(step, world.rank))
    backward(loss)
    parts = [loss_of(plain, batch(step, rank)) for rank in range(world.world_size)]
    backward(torch.stack(parts).mean())
    torch.testing.assert_close(loss, parts[world.rank], rtol=1e-5, atol=1e-6)


def train(
    model: nn.Module, plain: nn.Module, world: World, steps: int = 2
) -> torch.optim.Optimizer:
    """Train both, and compare losses, norms and in the end the parameters."""
    both = adamw(model), adamw(plain)
    for step in range(steps):
        step_gradients(model, plain, world, step)
        norm = clip_grad_norm_(model, 0.5)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
        assert world.all_equal(norm)
        for each in both:
            each.step()
            each.zero_grad()
    require_equal(model, plain)
    return both[0]


def require_equal(model: nn.Module, plain: nn.Module) -> None:
    """Every parameter of the plain model; sums are in another order."""
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            get_full_param(model, name), parameter.detach(), rtol=1e-5, atol=1e-6
        )


def require_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Every gradient of the plain model."""
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            get_full_grad(model, name), parameter.grad, rtol=1e-5, atol=1e-6
        )


@on_ranks(4)
def test_values_of_the_first_rank_go_to_the_ranks_of_its_experts(world: World) -> None:
    """sync_module_states keeps the experts of other ranks."""

    def forget(model: Model) -> None:
        # Ranks 0 and 1 are the first of the ranks with the same experts.
        for layer in layers_of(model) if world.rank > 1 else ():
            for value in layer.experts.parameters():
                local(value.detach()).zero_()

    sync = {"sync_module_states": True}
    model, plain = pair(MIXTRAL, world, prepare=forget, experts=sync)

    train(model, plain, world, steps=1)


@pytest.mark.req("B-22")
@on_ranks(4)
def test_the_norm_counts_each_expert_once(world: World) -> None:
    """The norm over all experts of all ranks, and gradients scaled by one factor."""
    model, plain = pair(Recipe(experts=3, layers=2), world)
    with no_sync(model):
        step_gradients(model, plain, world, 0)
    step_gradients(model, plain, world, 1)
    # Parameters of one layer alone.
    experts = [layers_of(each)[0].experts.parameters() for each in (model, plain)]
    expected = nn.utils.clip_grad_norm_(experts[1], 9.0)
    torch.testing.assert_close(clip_grad_norm_(experts[0], 9.0), expected)

    for order in (1.0, 2.0, float("inf")):
        norm = clip_grad_norm_(model, 0.5, order)

        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, order)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
        assert world.all_equal(norm)
    require_equal_gradients(model, plain)


@pytest.mark.req("M-02")
@pytest.mark.parametrize("recipe", [SHARED, Recipe(experts=3, ep=4)], ids=repr)
@on_ranks(4)
def test_training_and_state_are_those_of_the_plain_model(
    world: World, recipe: Recipe
) -> None:
    """Losses, norms, weights and moments, and names of the state dicts; and back."""
    model, plain = pair(recipe, world)
    optimizer = train(model, plain, world)

    state, moments = model.state_dict(), optim_state_dict(model, optimizer)

    assert set(state) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        assert world.all_equal(state[name])
    names = set(dict(plain.named_parameters()))
    assert set(moments["state"]) == names == set(moments["param_groups"][0]["params"])
    assert world.all_equal(moments["state"])
    again, _ = pair(recipe, world)
    other = adamw(again)
    again.load_state_dict(recipe.plain().state_dict())
    again.load_state_dict(state)
    optim_state_dict_to_load(again, other, moments, load_directly=True)
    for name, value in optim_state_dict(again, other)["state"].items():
        assert value["exp_avg"].shape == plain.get_parameter(name).shape
        assert torch.equal(value["exp_avg"], moments["state"][name]["exp_avg"])
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name])
    moments["state"]["layers.7.scale"] = {}
    text = message_of(partial(optim_state_dict_to_load, again, other, moments))
    assert "left over ['layers.7.scale']. Load it into" in text


@on_ranks(4)
def test_different_experts_are_no_different_weights(world: World) -> None:
    """No error for experts that differ by design, an error for replicas of one."""
    model, _ = pair(MIXTRAL, world, check_weights="error")
    loss_of(model, batch(0, world.rank))

    mesh = MIXTRAL.mesh(world)
    other = MIXTRAL.divided(mesh["ep"])
    with torch.no_grad():
        made: Any = layers_of(other)[0].experts.up
        made.to_local().add_(world.rank)
    for layer in layers_of(other):
        fully_shard(layer.experts, device_mesh=mesh["edp"], check_weights="error")
    fully_shard(other, device_mesh=data_of(mesh))
    with pytest.raises(DesyncError, match=r"parameter 'layers.0.experts.up' has other"):
        loss_of(other, batch(0, world.rank))


class TwoLayers(nn.Sequential):
    """A layer of this rank's own, without a word, below one of all ranks."""

    def __init__(self, own: dict[str, Any], data: DeviceMesh) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(self[0], **own)
        fully_shard(self, device_mesh=data)


@on_ranks(4)
def test_experts_without_a_word_are_refused(world: World) -> None:
    """Local experts: no rank can know the norm, so no rank gets a number of its own."""
    mesh = MIXTRAL.mesh(world)
    model = TwoLayers({"device_mesh": mesh["edp"]}, data_of(mesh))
    backward(model(torch.ones(2, 4)).sum())

    for call in (lambda: clip_grad_norm_(model, 1.0), lambda: find_nonfinite(model)):
        with pytest.raises(CompositionError) as caught:
            call()
        text = str(caught.value)
        assert "(root) over ranks 0-3, '0' over ranks " in text
        assert "stack them as DTensors of distribute_tensor(" in text
    takes: tuple[Callable[[], Any], ...] = (
        model.state_dict,
        lambda: optim_state_dict(model, adamw(model)),
    )
    for take in takes:
        with pytest.raises(CheckpointError, match="trained by 2 ranks of 4") as told:
            take()
        assert "Stack the experts as DTensors of distribute" in str(told.value)


@on_ranks(4)
def test_a_unit_of_a_rank_alone_has_the_state_of_a_plain_module(world: World) -> None:
    """Sharded over one rank: each rank keeps its own."""
    one = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    model = TwoLayers({"process_group": one}, data_of(MIXTRAL.mesh(world)))
    own: Any = model[0].weight
    nn.init.constant_(own, world.rank)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    nn.init.zeros_(own)
    model.load_state_dict(state)

    for value in (state["0.weight"], own):
        assert torch.equal(value, torch.full((4, 4), float(world.rank)))


def apart(world: World) -> Model:
    """Return a model whose experts are sharded over each rank alone."""
    mesh = MIXTRAL.mesh(world)
    model = MIXTRAL.divided(mesh["ep"])
    one = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    for layer in layers_of(model):
        fully_shard(layer.experts, process_group=one)
    return fully_shard(model, device_mesh=data_of(mesh))


def plain_beside(world: World) -> Model:
    """Nobody would reduce its gradients over the ranks of other experts."""
    mesh = MIXTRAL.mesh(world)
    model = MIXTRAL.divided(mesh["ep"])
    for layer in layers_of(model):
        layer.experts.scale = nn.Parameter(torch.ones(1))
        fully_shard(layer.experts, device_mesh=mesh["edp"])
    return fully_shard(model, device_mesh=data_of(mesh))


REFUSED: tuple[tuple[Callable[[World], Model], type[Exception], str], ...] = (
    (
        apart,
        CompositionError,
        r"holds DTensors over 2 ranks and is sharded over 1; .*mesh\['edp'\] to their",
    ),
    (
        plain_beside,
        CompositionError,
        "Parameter 'layers.0.experts.scale' is plain, in a unit of DTensors.*"
        r"Make it a DTensor over the same mesh \(Replicate\)",
    ),
)


@on_ranks(4)
def test_experts_that_could_not_be_averaged_are_refused(world: World) -> None:
    """At the first forward, by unit or parameter, with the way out."""
    for build, error, words in REFUSED:
        model = build(world)
        with pytest.raises(error, match=f"(?s){words}"):
            loss_of(model, batch(0, world.rank))


@on_ranks(4)
def test_a_replicated_parameter_beside_counts_once(world: World) -> None:
    """A bias that all experts share: its gradient is a sum over all of them."""
    mesh = MIXTRAL.mesh(world)
    model, plain = MIXTRAL.divided(mesh["ep"]), MIXTRAL.plain()
    for each in (model, plain):
        for layer in layers_of(each):
            bias = torch.ones(1)
            if each is model:
                bias = distribute_tensor(bias, mesh["ep"], [Replicate()])
            layer.experts.bias = nn.Parameter(bias)
            layer.experts.register_forward_hook(_add_bias)
    for layer in layers_of(model):
        fully_shard(layer.experts, device_mesh=mesh["edp"])
    fully_shard(model, device_mesh=data_of(mesh))

    train(model, plain, world)


def _add_bias(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    bias: Any = module.bias
    if hasattr(bias, "to_local"):
        # Each rank has the gradients of its own rows: parts of a sum.
        bias = bias.to_local(grad_placements=[Partial()])
    shifted: Tensor = out + bias
    return shifted


def require_plain_state(state: dict[str, Any], plain: nn.Module) -> None:
    """Every entry of the plain model, in host memory."""
    expected = plain.state_dict()
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert state[name].device.type == "cpu"
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def require_plain_moments(
    found: dict[str, Any], plain: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Every moment of the plain optimizer."""
    names: dict[Any, str] = {p: name for name, p in plain.named_parameters()}
    expected = {names[p]: values for p, values in optimizer.state.items()}
    assert set(found["state"]) == set(expected)
    listed = [name for each in found["param_groups"] for name in each["params"]]
    assert sorted(listed) == sorted(names.values())
    for name, values in expected.items():
        for key, value in values.items():
            torch.testing.assert_close(
                found["state"][name][key], value, rtol=1e-5, atol=1e-6
            )


@pytest.mark.req("M-01", "M-02")
@on_ranks(8)
def test_experts_beside_tensor_parallelism(world: World, tmp_path: Path) -> None:
    """On a mesh (edp, ep, tp): norms, weights and checkpoints of the plain model."""
    recipe = Recipe(experts=3, top=1, starved=True)
    (mesh, data), plain = recipe.mesh_with_tp(world), recipe.plain()
    model = recipe.sharded(mesh["ep"], mesh["edp"], data, tp=mesh["tp"])
    both = adamw(model), adamw(plain)
    for step in range(1):
        backward(loss_of(model, batch(step, data.get_local_rank())))
        parts = [loss_of(plain, batch(step, n)) for n in range(data.size())]
        backward(torch.stack(parts).mean())
        found = clip_grad_norm_(model, 0.5)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        for each in both:
            each.step()
            each.zero_grad()

    weights = model.state_dict()
    require_plain_state({k: v.cpu() for k, v in weights.items()}, plain)
    require_plain_moments(optim_state_dict(model, both[0]), plain, both[1])
    save(tmp_path / "step-2", model, both[0])
    load(tmp_path / "step-2", plain, both[1])
    for name, value in plain.state_dict().items():
        assert torch.equal(weights[name], value), name
