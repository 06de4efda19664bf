"""Context parallelism: ranks that hold parts of the same sequences shard, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    clip_grad_norm_,
    fully_shard,
)
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.on_ranks import on_ranks
from tests.support.world import World

WIDTH, LENGTH, BATCH = 6, 8, 4
MESHES = {
    "dp_replicate, dp_shard, cp": (2, 1, 2),
    "replicate, shard, context": (1, 2, 2),
}


class Gathered(torch.autograd.Function):
    """The parts of all ranks; the gradient of a part is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather along the length."""
        ctx.group = group
        parts = [
            torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Add the gradients of all ranks."""
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Attends to the whole sequences, of which the ranks of ``group`` hold parts."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, own length, WIDTH)`` to the same."""
        seen = x
        if self.group is not None:
            seen = Gathered.apply(x, self.group)  # type: ignore[no-untyped-call]
        scores = self.q(x) @ self.k(seen).transpose(1, 2)
        result: Tensor = x + scores.softmax(-1) @ self.v(seen)
        return result


def model_of(group: dist.ProcessGroup | None) -> nn.Sequential:
    """Equal on all ranks."""
    torch.manual_seed(0)
    blocks = [Attention(group), nn.Linear(WIDTH, WIDTH), Attention(group)]
    return nn.Sequential(*blocks).double()


def named_mesh(names: str, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split(", ")))


def sequences(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)


def train(model: nn.Module, rows: slice, columns: slice) -> list[float]:
    """The norms of three steps on a part of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        model(sequences(step)[rows, columns]).square().mean().backward()
        if _get_fsdp_handles(model):
            norms.append(float(clip_grad_norm_(model, 0.1)))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return norms


def part(length: int, index: int, count: int) -> slice:
    return slice(index * length // count, (index + 1) * length // count)


@pytest.mark.req("M-03")
@pytest.mark.parametrize(
    ("names", "path"), [*zip(MESHES, ["composable", "wrapper"], strict=True)]
)
@on_ranks(4)
def test_training_over_a_named_mesh_is_that_of_whole_sequences(
    world: World, names: str, path: str
) -> None:
    """Rows are divided over the data dims, columns over the context dim."""
    mesh = named_mesh(names, MESHES[names])
    outer, inner, context = mesh.mesh.shape
    group = mesh.get_group(2) if context > 1 else None
    at = mesh.get_coordinate()
    assert at is not None
    model: nn.Module = model_of(group)
    if path == "wrapper":
        model = FullyShardedDataParallel(
            model, device_mesh=mesh, auto_wrap_policy=ModuleWrapPolicy({Attention})
        )
    else:
        fully_shard(model[0], device_mesh=mesh)  # type: ignore[index]
        fully_shard(model, device_mesh=mesh)
    plain = model_of(None)

    rows = part(BATCH, at[0] * inner + at[1], outer * inner)
    norms = train(model, rows, part(LENGTH, at[2], context))
    expected = train(plain, slice(None), slice(None))

    torch.testing.assert_close(norms, expected, rtol=1e-10, atol=0)
    for name, value in plain.state_dict().items():
        own = model.state_dict()[name]
        torch.testing.assert_close(own, value, rtol=1e-9, atol=1e-11)
    groups = {
        (h.groups.shard_world_size, h.groups.replicas) for h in _get_fsdp_handles(model)
    }
    assert groups == {(inner * context, outer)}
