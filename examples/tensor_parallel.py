"""Cut matrices over two ranks, and shard each half over the other ranks.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py

``parallelize_module`` cuts the linear layers over the dimension ``tp`` of a mesh, and
``fully_shard`` divides the halves over the dimension ``dp``. A plain model trains
beside, on the data of all ranks; in the end losses, norms and weights are compared.
"""

# example: --steps 12
# quick: --steps 3

from __future__ import annotations

import argparse
import sys

import torch
from lm_world import World, joined_world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from composable_fsdp import clip_grad_norm_, fully_shard, get_full_param

WIDTH, HIDDEN, BATCH = 32, 128, 16


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the two matrices."""
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


def build() -> nn.Sequential:
    """Return the model, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))


def parallel(mesh: DeviceMesh) -> nn.Sequential:
    """Return the model cut over ``tp`` and sharded over ``dp``."""
    model = build()
    for block in model.children():
        if not isinstance(block, Block):
            continue  # the head stays whole
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, device_mesh=mesh["dp"])
    fully_shard(model, device_mesh=mesh["dp"])
    return model


def batch(part: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the examples of a data rank, equal in every step, and their values."""
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(BATCH, WIDTH, generator=generator).to(device)
    return x, x.sin().sum(1, keepdim=True)


def run(steps: int, world: World) -> bool:
    """Train both models; return whether they agree and the loss fell."""
    # A world of an odd number of ranks has nothing to cut.
    tp = 2 if world.size % 2 == 0 else 1
    mesh = init_device_mesh(
        world.device.type, (world.size // tp, tp), mesh_dim_names=("dp", "tp")
    )
    model, plain = parallel(mesh), build()
    model.to(world.device)
    plain.to(world.device)
    both = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, plain)]
    parts, mine = mesh["dp"].size(), mesh["dp"].get_local_rank()
    world.say(f"data over {parts} ranks, matrices over {tp}")

    first = last = apart = 0.0
    for _step in range(steps):
        x, y = batch(mine, world.device)
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch
        losses = [
            F.mse_loss(plain(x), y)
            for x, y in (batch(part, world.device) for part in range(parts))
        ]
        loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
        norm = clip_grad_norm_(model, 1.0)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        apart = max(apart, abs(norm.item() / expected.item() - 1))
        for each in both:
            each.step()
            each.zero_grad()
        last = loss.item()
        first = first or last
    weights = max(
        (get_full_param(model, name) - value.detach()).abs().max().item()
        for name, value in plain.named_parameters()
    )
    world.say(f"loss {first:.3f} -> {last:.3f}")
    world.say(f"beside the plain model: norms {apart:.1e}, weights {weights:.1e} apart")
    return last < first and apart < 1e-3 and weights < 1e-3


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Train on a mesh of two dimensions.")
    parser.add_argument("--steps", type=int, default=12, help="(%(default)s)")
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, world) else 1


if __name__ == "__main__":
    sys.exit(main())
