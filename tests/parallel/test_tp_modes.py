"""Tensor-parallel models on meta, under loss parallel, and with DTensors as buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from composable_fsdp import (
    fsdp2,
    get_full_grad,
    get_full_param,
    load,
    save,
    set_full_param,
)
from composable_fsdp.errors import PlanError
from tests.parallel.models import (
    Model,
    Recipe,
    batch,
    data_rank,
    loss_of,
    mesh_of,
    sharded,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World


def require_plain_step(model: nn.Module, world: World, mesh: DeviceMesh) -> None:
    """Loss and gradients of a step are those of the plain model on all data."""
    plain, rank = Recipe().plain(), data_rank(mesh)
    loss: Any = loss_of(model, batch(0, rank))
    backward(loss)
    parts = [loss_of(plain, batch(0, n)) for n in range(mesh["dp"].size())]
    backward(torch.stack(parts).mean())
    found = loss.full_tensor() if isinstance(loss, DTensor) else loss
    torch.testing.assert_close(found, parts[rank], rtol=1e-5, atol=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            get_full_grad(model, name), parameter.grad, rtol=1e-4, atol=1e-6
        )


Way = Callable[[Model, DeviceMesh], Model]
PLAN: dict[str, Any] = {
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
    "head": lambda: ColwiseParallel(output_layouts=Replicate()),
    "blocks.0.up": ColwiseParallel,
    "blocks.0.down": RowwiseParallel,
}


def parallel(model: Model, mesh: DeviceMesh, **changed: Any) -> Model:
    """Cut a model over ``tp``; ``changed`` replaces styles."""
    styles = {name: made() for name, made in PLAN.items()} | changed
    parallelize_module(model, mesh["tp"], styles)
    return model


def on_meta(mesh: DeviceMesh) -> Model:
    return parallel(Recipe().plain().to("meta"), mesh)


def fill(module: nn.Module) -> None:
    """Give a module's own parameters memory and values."""
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def initialised(model: Model, mesh: DeviceMesh) -> Model:
    sharded(model, mesh, param_init_fn=fill)
    for name, parameter in Recipe().plain().named_parameters():
        assert (get_full_param(model, name) == 0.5).all()
        set_full_param(model, name, parameter.detach())
    return model


def broadcast(model: Model, mesh: DeviceMesh) -> Model:
    # On meta on all data ranks but the first, which has values.
    if mesh["dp"].get_local_rank() == 0:
        model = parallel(Recipe().plain(), mesh)
    return sharded(model, mesh, sync_module_states=True)


@pytest.mark.req("M-01")
@pytest.mark.parametrize("way", [initialised, broadcast])
@on_ranks(4)
def test_dtensors_on_meta_train_once_they_have_values(world: World, way: Way) -> None:
    """Sharded on meta, a step is that of the plain model, however values came."""
    mesh = mesh_of(world, 2)

    model = way(on_meta(mesh), mesh)

    require_plain_step(model, world, mesh)


@pytest.mark.req("M-01")
@on_ranks(4)
def test_dtensors_on_meta_load_a_checkpoint(world: World, tmp_path: Path) -> None:
    """Names and shapes are whole; a forward without values names the parameters."""
    mesh = mesh_of(world, 2)
    save(tmp_path / "step-1", sharded(parallel(Recipe().plain(), mesh), mesh))
    model = sharded(on_meta(mesh), mesh)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    plain = Recipe().plain().state_dict()
    assert shapes == {name: value.shape for name, value in plain.items()}
    with pytest.raises(PlanError, match="still on the meta device"):
        model(batch(0, 0))

    model.to_empty(device="cpu")
    load(tmp_path / "step-1", model)

    require_plain_step(model, world, mesh)


@pytest.mark.req("M-01")
@on_ranks(4)
def test_loss_parallel_is_the_loss_of_the_plain_model(world: World) -> None:
    """Logits stay cut over the vocabulary; loss and gradients are the plain ones."""
    mesh = mesh_of(world, 2)
    cut = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = sharded(parallel(Recipe().plain(), mesh, head=cut), mesh)

    with loss_parallel():
        require_plain_step(model, world, mesh)


class Block(nn.Module):
    """Two matrices that are cut, and two buffers that are on the mesh whole."""

    scale: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        result: Tensor = x + self.down(torch.relu(self.up(x))) * scale.to_local()
        return result


def trained(apply: Any, mesh: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and full state dict of a model that is filled after meta."""
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
        for name, buffer in list(block.named_buffers()):
            whole = distribute_tensor(buffer, mesh["tp"], [Replicate()])
            setattr(block, name, whole)
        apply(block)
    apply(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.02 * (number + 1))
        for buffer in model.buffers():
            assert isinstance(buffer, DTensor)
            buffer.fill_(1.5)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(2):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state: dict[str, Any] = model.state_dict()
    return losses, {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }


@on_ranks(4)
def test_dtensor_buffers_on_meta_train_as_under_fsdp2(world: World) -> None:
    """Losses, weights and buffers are those of torch's FSDP2."""
    mesh = init_device_mesh(
        "cpu", (world.world_size // 2, 2), mesh_dim_names=("dp", "tp")
    )
    dp = mesh["dp"]
    losses, state = trained(lambda module: fsdp2.fully_shard(module, mesh=dp), mesh)
    expected, theirs = trained(
        lambda module: torch.distributed.fsdp.fully_shard(module, mesh=dp), mesh
    )

    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[0] > losses[-1]
    for name, value in theirs.items():
        torch.testing.assert_close(state[name], value)
