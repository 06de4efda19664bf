"""Models that ``parallelize_module`` cuts, and the plain tensor-parallel reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from composable_fsdp import fully_shard
from tests.support.world import World

VOCABULARY, LENGTH = 16, 4


class Block(nn.Module):
    """A residual block; ``hidden`` may not divide by the number of ranks."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """An embedding, blocks and a head, which may be tied to the embedding."""

    def __init__(
        self, hidden: int = 32, dim: int = 8, *, blocks: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


@dataclass(frozen=True)
class Recipe:
    """A model and how tensor parallelism cuts it."""

    sequence: bool = False
    tied: bool = False
    hidden: int = 32
    blocks: int = 1

    def plain(self) -> Model:
        torch.manual_seed(7)
        return Model(self.hidden, blocks=self.blocks, tied=self.tied)

    def parallel(self, mesh: DeviceMesh) -> Model:
        """Return the model with DTensors over the mesh dim ``tp``."""
        model, tp = self.plain(), mesh["tp"]
        if tp.size() == 1 and mesh.size() == 1:
            return model
        here = Shard(1) if self.sequence else Replicate()
        parallelize_module(
            model,
            tp,
            {
                "embedding": RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=here
                ),
                "head": ColwiseParallel(input_layouts=here, output_layouts=Replicate()),
                **({"norm": SequenceParallel()} if self.sequence else {}),
            },
        )
        for block in model.blocks:
            parallelize_module(
                block,
                tp,
                {
                    # Parts of other sizes stay DTensors, whose shape is known.
                    "up": ColwiseParallel(
                        input_layouts=here, use_local_output=self.hidden % 4 == 0
                    ),
                    "down": RowwiseParallel(output_layouts=here),
                    **({"norm": SequenceParallel()} if self.sequence else {}),
                },
            )
        if self.tied:
            # parallelize_module makes a parameter of its own at each place.
            model.head.weight = model.embedding.weight
        return model


def block_of(model: Model) -> Block:
    """Return the first block."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block


_alive: WeakSet[dist.ProcessGroup] = WeakSet()


def forget_meshes() -> None:
    """Empty DTensor's caches of meshes whose groups went with the test before."""
    groups = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}
    if groups & set(_alive):
        # Meshes of this test: DTensor need not find out again how to shard each op.
        return
    _alive.update(groups)
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch
    redistribution: Any = _redistribute
    for each in vars(redistribution).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    getattr(redistribution, "_planner_cache", {}).clear()


def mesh_of(world: World, dp: int, *, replicas: int = 1) -> DeviceMesh:
    """Return a mesh (dp, tp), or (replicate, shard, tp) with ``replicas``."""
    forget_meshes()
    if replicas > 1:
        sizes = (replicas, dp, world.world_size // (dp * replicas))
        return init_device_mesh(
            "cpu", sizes, mesh_dim_names=("replicate", "shard", "tp")
        )
    return init_device_mesh(
        "cpu", (dp, world.world_size // dp), mesh_dim_names=("dp", "tp")
    )


def sharded(model: Model, mesh: DeviceMesh, **options: Any) -> Model:
    """Shard each block and the model over the data dims of ``mesh``."""
    names = mesh.mesh_dim_names or ()
    data = mesh["replicate", "shard"] if "replicate" in names else mesh["dp"]
    for block in model.blocks:
        fully_shard(block, device_mesh=data, **options)
    fully_shard(model, device_mesh=data, **options)
    return model


def data_rank(mesh: DeviceMesh) -> int:
    """Return which part of the data this rank computes; equal on ranks of a ``tp``."""
    names = mesh.mesh_dim_names or ()
    if "replicate" in names:
        rows = mesh["shard"].size()
        return (
            mesh["replicate"].get_local_rank() * rows + mesh["shard"].get_local_rank()
        )
    return mesh["dp"].get_local_rank()


def batch(step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids.flatten())


def average(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of a plain tensor-parallel model over the data ranks."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(
                parameter.device_mesh,  # type: ignore[attr-defined]  # a DTensor
                parameter.placements,  # type: ignore[attr-defined]  # a DTensor
            )
            parameter.grad = gradient
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for name in reversed(names):
            dist.all_reduce(local, group=mesh.get_group(name))
        local /= mesh.size() // mesh["tp"].size()


def whole(value: Tensor) -> Tensor:
    found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def norm_of(model: nn.Module) -> Tensor:
    """Return the norm of all gradients of a plain tensor-parallel model."""
    norms = [whole(p.grad).norm() for p in model.parameters() if p.grad is not None]
    total: Tensor = torch.stack(norms).norm()
    return total


def pair(recipe: Recipe, mesh: DeviceMesh, **options: Any) -> tuple[Model, Model]:
    return sharded(recipe.parallel(mesh), mesh, **options), recipe.parallel(mesh)
