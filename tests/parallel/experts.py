"""Mixtures of experts whose ranks hold different experts, and the plain model.

Tokens travel to the rank of their expert and back by all-to-all::

    rank 0   tokens --+   +-- experts 0, 1 --+   +-- outputs
                      |===|                  |===|
    rank 1   tokens --+   +-- experts 2, 3 --+   +-- outputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_fsdp import fully_shard
from tests.parallel.models import forget_meshes
from tests.support.world import World

VOCABULARY, LENGTH, DIM, HIDDEN = 13, 4, 8, 12


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        received: list[int],
        sent: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchanged(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        back = _exchanged(gradient, ctx.sent, ctx.received, ctx.group)
        return back, None, None, None


def _exchanged(
    x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def travel(
    x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    out: Tensor = _Exchange.apply(x, received, sent, group)  # type: ignore[no-untyped-call]  # torch
    return out


def shares(experts: int, ranks: int) -> list[int]:
    sizes = [len(part) for part in torch.arange(experts).chunk(ranks)]
    return sizes + [0] * (ranks - len(sizes))


def local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found


class Stacked(nn.Module):
    """The experts of a layer in one parameter per matrix."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, DIM, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, DIM) / 3)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of ``x`` go to the experts in turn, ``counts`` to each."""
        up, down = local(self.up), local(self.down)
        parts = torch.split(x, list(counts))
        rows = [torch.relu(p @ u) @ d for p, u, d in zip(parts, up, down, strict=True)]
        # A rank without experts gets no rows, but is part of the graph.
        return torch.cat([x[:0] + 0 * (up.sum() + down.sum()), *rows])


class Expert(nn.Module):
    """An expert of DeepSeek: a gate beside the first matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Ranks:
    """A process group; copies of a model share it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: object) -> Ranks:
        return self


class Layer(nn.Module):
    """A router, its experts, and of DeepSeek the expert that sees all tokens."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, recipe.experts, bias=False)
        self.experts: Any = Stacked(recipe.experts)
        self.shared = Expert() if recipe.shared else None
        self.ranks: Ranks | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, -2)
        weight, choice = self.router(rows).softmax(-1).topk(self.recipe.top)
        order = choice.flatten().argsort(stable=True)
        token = order // self.recipe.top
        counts = torch.bincount(choice.flatten(), minlength=self.recipe.experts)
        out = self._computed(rows[token], counts)
        out = out * weight.flatten()[order][:, None]
        mixed = torch.zeros_like(rows).index_add(0, token, out.to(rows.dtype))
        if self.shared is not None:
            mixed = mixed + self.shared(rows)
        return x + mixed.view_as(x)

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs for rows that are in the order of their experts."""
        if self.ranks is None:
            out: Tensor = self.experts(rows, counts.tolist())
            return out
        group, ranks = self.ranks.group, self.ranks.group.size()
        here = shares(self.recipe.experts, ranks)
        own = here[group.rank()]
        told = counts.new_empty(ranks * own)
        dist.all_to_all_single(told, counts, [own] * ranks, here, group=group)
        sent = [int(part.sum()) for part in torch.split(counts, here)]
        # By rank of origin and, of each, by expert.
        pieces = told.view(ranks, own)
        received = [int(n) for n in pieces.sum(1)]
        got = travel(rows, received, sent, group)
        at = torch.split(torch.arange(len(got)), told.tolist()) if own else ()
        by_expert = [at[r * own + e] for e in range(own) for r in range(ranks)]
        order = torch.cat([torch.arange(0), *by_expert])
        done = self.experts(got[order], pieces.sum(0).tolist())
        return travel(done[order.argsort()], sent, received, group)


class Model(nn.Module):
    """An embedding, layers of experts and a head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(recipe.layers))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Recipe:
    """A mixture of experts, and how the ranks divide the experts."""

    experts: int = 4
    layers: int = 1
    top: int = 2
    shared: bool = False
    ep: int = 2
    starved: bool = False
    """Whether the router sends no token to the last expert."""

    def plain(self) -> Model:
        """Return the plain model with all experts, equal on all ranks."""
        torch.manual_seed(5)
        model = Model(self)
        if self.starved:
            for layer in layers_of(model):
                layer.router.register_forward_hook(_starve)
        return model

    def mesh(self, world: World) -> DeviceMesh:
        """Return the mesh (edp, ep): ranks with equal experts, with other experts."""
        forget_meshes()
        sizes = (world.world_size // self.ep, self.ep)
        return init_device_mesh("cpu", sizes, mesh_dim_names=("edp", "ep"))

    def mesh_with_tp(self, world: World) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the mesh (edp, ep, tp) with two ranks of ``tp``, and all data."""
        forget_meshes()
        mesh = init_device_mesh(
            "cpu",
            (world.world_size // self.ep // 2, self.ep, 2),
            mesh_dim_names=("edp", "ep", "tp"),
        )
        return mesh, mesh["edp", "ep"]._flatten("dp")

    def divided(self, ep: DeviceMesh) -> Model:
        """Return the model in which each rank of ``ep`` holds its own experts."""
        model = self.plain()
        for layer in layers_of(model):
            layer.ranks = Ranks(ep.get_group())
            for name, value in list(layer.experts.named_parameters()):
                made = distribute_tensor(value.detach(), ep, [Shard(0)])
                setattr(layer.experts, name, nn.Parameter(made))
        return model

    def sharded(
        self,
        ep: DeviceMesh,
        edp: DeviceMesh,
        data: DeviceMesh,
        *,
        tp: DeviceMesh | None = None,
        units: str = "layers",
        prepare: Callable[[Model], object] = lambda model: None,
        **options: Any,
    ) -> Model:
        """Return the divided model with experts over ``edp``, the rest over ``data``.

        ``units``: "layers" with their "experts", or "experts" alone below the model.
        ``options`` under "experts" are those of experts alone.
        """
        model = self.divided(ep)
        if tp is not None:
            cut(model, tp)
        prepare(model)
        changed = options.pop("experts", {})
        own = {**options, **changed}
        for layer in layers_of(model):
            fully_shard(layer.experts, device_mesh=edp, **own)
            if units == "layers":
                fully_shard(layer, device_mesh=data, **options)
        fully_shard(model, device_mesh=data, **options)
        return model


def cut(model: Model, tp: DeviceMesh) -> None:
    """Cut the matrices over ``tp``; stacked experts are equal on its ranks."""
    parallelize_module(
        model,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for each in model.modules():
        if isinstance(each, Expert):
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel()}
            parallelize_module(each, tp, {**plan, "down": RowwiseParallel()})


def _starve(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out - torch.nn.functional.one_hot(torch.tensor(out.shape[-1] - 1)) * 1e3


def layers_of(model: nn.Module) -> list[Layer]:
    return [each for each in model.modules() if isinstance(each, Layer)]


def batch(step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).float().flatten(0, -2)
    return nn.functional.cross_entropy(logits, ids.flatten())
