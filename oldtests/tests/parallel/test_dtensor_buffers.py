"""A model on meta whose buffers are DTensors, as torchtitan has with two TP ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_fsdp import fsdp2
from tests.support.on_ranks import on_ranks
from tests.support.place import World


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
