"""Experts with an ``expert_mesh`` under modes that their model may be in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import (
    clip_grad_norm_,
    fully_shard,
    load,
    optim_state_dict,
    save,
)
from tests.parallel.experts import Model, Recipe, batch, layers_of, loss_of
from tests.parallel.test_experts import (
    adamw,
    data_of,
    pair,
    require_equal_gradients,
    step_gradients,
    train,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World

LISTED, UNEVEN = Recipe(listed=True, shared=True), Recipe(listed=True, experts=3)


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


def on_meta(recipe: Recipe, mesh: DeviceMesh) -> Model:
    """Return the divided model, sharded without values."""
    model = recipe.divided(mesh["ep"]).to("meta")
    data = data_of(mesh)
    for layer in layers_of(model):
        fully_shard(layer.experts, device_mesh=mesh["edp"], expert_mesh=mesh["ep"])
        fully_shard(layer, device_mesh=data)
    fully_shard(model, device_mesh=data)
    return model


@on_ranks(4)
def test_experts_on_meta_train_after_a_load(world: World) -> None:
    """The plain model's state dict fills each rank's experts."""
    recipe = UNEVEN
    mesh, plain = recipe.mesh(world), recipe.plain()
    model = on_meta(recipe, mesh)
    assert set(model.state_dict()) == set(plain.state_dict())

    model.load_state_dict(plain.state_dict(), assign=True)

    train(model, plain, world, steps=1)
    require_plain_state(model.state_dict(), plain)


@on_ranks(4)
def test_ranks_of_the_same_experts_freeze_the_same(world: World) -> None:
    """Other experts may be frozen elsewhere; a copy of an expert may not differ."""
    recipe = LISTED
    model, plain = pair(recipe, world)
    chosen = "layers.0.experts.each.0."
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(not name.startswith(chosen))
    step_gradients(model, plain, world, 0)
    require_equal_gradients(model, plain)
    model.zero_grad()

    if world.rank < 2:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith("layers.0.experts."))
    text = message_of(lambda: backward(loss_of(model, batch(0, world.rank))))

    assert text.startswith("DesyncError: Ranks disagree in forward"), text
    assert "of 'layers.0.experts.each." in text


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
