"""Programs in which each rank drops units at random, and what they must compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_fsdp import BackwardPrefetch, ShardingStrategy, access, no_sync
from composable_fsdp.features import call_where
from tests.support.reference import apply_units, backward, differences
from tests.support.world import World

WIDTH = 6
Where = Callable[..., Any]


def plain_where(module: nn.Module, used: bool, *args: Any) -> Any:
    return module(*args) if used else 0


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded, and which rank runs what in which forward."""

    drops: tuple[int, ...] = (1, 2, 0, 3, 1)
    """Per forward, and per call in it: bit r, whether rank r runs the module."""
    order: tuple[int, ...] = (0, 1)
    """The blocks of the tower, as its forward runs them: also twice, or not at all."""
    kept: str = "nothing"
    """What a checkpoint recomputes: nothing, block, span (of the blocks), tower, call,
    body (of the model, around the call)."""
    calls: int = 1
    inner: bool = False  # whether the tower calls its last block by call_where
    joins: str = "add"  # or "times"
    frozen: str = "nothing"  # or "tower", "block", never all of a program
    early: bool = True  # whether the call comes before the layer of text
    micro: int = 1  # forwards per step
    path: str = "composable"
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    reshards: bool = True  # after the forward, and after backward
    zeros: bool = False  # set_reduce_scatter_unused_params


class Block(nn.Module):
    """A unit of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Tower(nn.Module):
    """What a rank may drop: parameters of its own around two units."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.where = program, plain_where
        self.patch, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList()
        self.blocks.extend(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def run(self, image: Tensor) -> Tensor:
        """Patch, blocks, norm."""
        kept, last = self.program.kept, len(self.program.order) - 1
        x = torch.tanh(self.patch(image))

        def span(x: Tensor) -> Tensor:
            for at, index in enumerate(self.program.order):
                block = self.blocks[index]
                if self.program.inner and at == last:
                    # The same on all ranks that run the tower.
                    x = x + self.where(block, index == 0, x)
                elif kept == "block":
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            return x

        x = checkpoint(span, x, use_reentrant=False) if kept == "span" else span(x)
        return cast(Tensor, self.norm(x))

    def forward(self, image: Tensor) -> Tensor:
        if self.program.kept == "tower":
            return cast(Tensor, checkpoint(self.run, image, use_reentrant=False))
        return self.run(image)


class Model(nn.Module):
    """Text on every rank, and a tower for some."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.where = program, plain_where
        self.embed, self.tower = nn.Linear(WIDTH, WIDTH), Tower(program)
        self.layer, self.head = Block(), nn.Linear(WIDTH, 1)

    def body(self, x: Tensor, image: Tensor, uses: tuple[bool, ...]) -> Tensor:
        """Run what a checkpoint may hold."""
        for at, used in enumerate(uses):
            if at == 0 and not self.program.early:
                x = self.layer(x)
            if self.program.kept == "call":
                given = (self.where, self.tower, used, image)
                seen = checkpoint(*given, use_reentrant=False)
            else:
                seen = self.where(self.tower, used, image)
            x = x * (1 + seen) if self.program.joins == "times" else x + seen
        return self.layer(x) if self.program.early else x

    def forward(self, x: Tensor, image: Tensor, uses: tuple[bool, ...]) -> Tensor:
        x = torch.tanh(self.embed(x))
        if self.program.kept == "body":
            x = checkpoint(self.body, x, image, uses, use_reentrant=False)
        else:
            x = self.body(x, image, uses)
        return cast(Tensor, self.head(torch.tanh(x)).square().mean())


def built(program: Program) -> Model:
    """The plain model of a program, in float64."""
    torch.manual_seed(0)
    model = Model(program).double()
    frozen = {"tower": model.tower, "block": model.tower.blocks[0]}
    if program.frozen in frozen:
        frozen[program.frozen].requires_grad_(False)
    return model


def sharded(plain: Model) -> Any:
    """The sharded model of the same values, whose forwards call ``call_where``."""
    program, units = plain.program, ["layer", "tower", "tower.blocks.0"]
    units.append("tower.blocks.1")
    model: Any = copy.deepcopy(plain)
    for each in model.modules():
        if hasattr(each, "where"):
            each.where = call_where
    options: dict[str, Any] = {"strategy": program.strategy}
    options["backward_prefetch"] = program.prefetch
    if (device := plain.head.weight.device).type == "cuda":
        options["device_id"] = device.index or 0
    if program.strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    model = apply_units(model, units, path=program.path, **options)
    access.set_reshard_after_forward(model, program.reshards)
    if program.zeros:
        access.set_reduce_scatter_unused_params(model, True)
    return model


def uses(program: Program, at: int, rank: int) -> tuple[bool, ...]:
    """Whether ``rank`` runs the module, in each call of forward ``at``."""
    first = at * program.calls
    drops = [
        program.drops[i % len(program.drops)]
        for i in range(first, first + program.calls)
    ]
    return tuple(bool(drop >> rank & 1) for drop in drops)


def check_program(world: World, program: Program) -> None:
    """Three steps of the sharded model, which are those of the plain model."""
    plain = built(program).to(world.device)
    model = sharded(plain)
    batches = torch.Generator().manual_seed(1)
    forwards, example = 0, next(plain.parameters())
    for _ in range(3):
        ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        anyone = False
        for micro in range(program.micro):
            for rank in range(world.world_size):
                x, image = torch.randn(2, 3, WIDTH, generator=batches).to(example)
                given = x, image, uses(program, forwards, rank)
                anyone |= any(given[2])
                backward(plain(*given) / world.world_size)
                if rank == world.rank:
                    mine = given
            last = micro == program.micro - 1
            access.set_reshard_after_backward(model, program.reshards or last)
            with nullcontext() if last else no_sync(model):
                backward(model(*mine))
            forwards += 1
        trained = [p for p in model.tower.parameters() if p.requires_grad]
        if not program.zeros:
            assert all((p.grad is not None) == anyone for p in trained if p.numel())
        ours.step()
        theirs.step()
        model.zero_grad()
        plain.zero_grad()
        found = differences(model.state_dict(), plain.state_dict())

        assert all(value < 1e-12 for value in found.values()), (program, found)


def check_programs(world: World, programs: list[Program]) -> None:
    for program in programs:
        check_program(world, program)
