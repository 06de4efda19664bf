"""Give each rank other experts, and send the tokens to them.

    torchrun --standalone --nproc-per-node 4 examples/expert_parallel.py

A router sends each token to two of eight experts. Each rank of the dimension ``ep``
holds some of the experts, and an all-to-all carries tokens to their experts and back.
The ranks of ``edp`` share the same experts; all ranks share the rest of the model. A
plain model trains beside, on the data of all ranks; in the end losses, norms and
weights are compared.
"""

# example: --steps 12
# quick: --steps 3

from __future__ import annotations

import argparse
import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from lm_world import World, joined_world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from composable_fsdp import clip_grad_norm_, fully_shard, get_full_param

WIDTH, HIDDEN, BATCH, EXPERTS, CHOSEN = 16, 32, 24, 8, 2


class Travel(torch.autograd.Function):
    """Sends rows to other ranks; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        received: list[int],
        sent: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Send ``sent`` rows to each rank, and return the ``received`` of each."""
        ctx.received, ctx.sent, ctx.group = received, sent, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send each gradient to the rank of its row."""
        gradient = gradients[0].contiguous()
        back = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(back, gradient, ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


class Experts(nn.Module):
    """All experts of a layer, one behind the other in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 6)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Give ``counts`` rows to each expert of this rank; there may be none."""
        up, down = (
            value.to_local() if isinstance(value, DTensor) else value
            for value in (cast(Tensor, self.up), cast(Tensor, self.down))
        )
        parts = torch.split(rows, counts)
        return torch.cat(
            [F.gelu(x @ u) @ d for x, u, d in zip(parts, up, down, strict=True)]
        )


class Mixture(nn.Module):
    """A router and its experts, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.ep: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``(tokens, WIDTH)`` to the same."""
        rows = self.norm(x)
        gates, choice = self.router(rows).softmax(-1).topk(CHOSEN)
        # Rows in the order of their experts, so that each rank's lie together.
        order = choice.flatten().argsort(stable=True)
        token = order // CHOSEN
        counts = torch.bincount(choice.flatten(), minlength=EXPERTS)
        out = self.computed(rows[token], counts) * gates.flatten()[order][:, None]
        return x.index_add(0, token, out)

    def computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what the experts make of ``counts`` rows each."""
        if self.ep is None:
            return cast(Tensor, self.experts(rows, counts.tolist()))
        ranks = self.ep.size()
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts, group=self.ep)
        # Per rank of origin, the rows for each expert of this rank.
        pieces = told.view(ranks, -1)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = pieces.sum(1).tolist()
        got = travel(rows, received, sent, self.ep)
        # By expert; rows of a rank of origin came by expert, too.
        expert = torch.arange(pieces.shape[1], device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(told).argsort(stable=True)
        done = self.experts(got[order], pieces.sum(0).tolist())
        return travel(done[order.argsort()], sent, received, self.ep)


def travel(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send ``sent`` rows to each rank, and return the ``received`` of each."""
    out = Travel.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]  # torch
    return cast(Tensor, out)


def build() -> nn.Sequential:
    """Return the model with all experts, equal on all ranks."""
    torch.manual_seed(0)
    layers = [Mixture() for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))


def parallel(mesh: DeviceMesh, data: DeviceMesh) -> nn.Sequential:
    """Return the model whose ranks of ``ep`` hold other experts."""
    model = build()
    for layer in model.children():
        if not isinstance(layer, Mixture):
            continue
        layer.ep = mesh["ep"].get_group()
        for name, value in list(layer.experts.named_parameters()):
            cut = distribute_tensor(value.detach(), mesh["ep"], [Shard(0)])
            setattr(layer.experts, name, nn.Parameter(cut))
        # The ranks of edp have the same experts, all ranks have the same rest.
        fully_shard(layer.experts, device_mesh=mesh["edp"])
        fully_shard(layer, device_mesh=data)
    return fully_shard(model, device_mesh=data)


def batch(part: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the examples of a rank, equal in every step, and their values."""
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(BATCH, WIDTH, generator=generator).to(device)
    return x, x.sin().sum(1, keepdim=True)


def run(steps: int, world: World) -> bool:
    """Train both models; return whether they agree and the loss fell."""
    # A world of an odd number of ranks has all experts on each.
    ep = 2 if world.size % 2 == 0 else 1
    mesh = init_device_mesh(
        world.device.type, (world.size // ep, ep), mesh_dim_names=("edp", "ep")
    )
    data = mesh._flatten("dp")
    model, plain = parallel(mesh, data).to(world.device), build().to(world.device)
    both = [
        torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4) for m in (model, plain)
    ]
    world.say(
        f"{EXPERTS} experts: {EXPERTS // ep} on a rank, shared by {world.size // ep}"
    )

    first = last = apart = 0.0
    for _step in range(steps):
        x, y = batch(world.rank, world.device)
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch
        losses = [
            F.mse_loss(plain(x), y)
            for x, y in (batch(rank, world.device) for rank in range(world.size))
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
    parser = argparse.ArgumentParser(description="Train experts on their own ranks.")
    parser.add_argument("--steps", type=int, default=12, help="(%(default)s)")
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, world) else 1


if __name__ == "__main__":
    sys.exit(main())
