"""The models of ``benchmarks.overlap``, and each library with each of its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from composable_fsdp import BackwardPrefetch, fully_shard, plan
from tests.support.tiny import TinyBlock

WORLD = 8
PRE, POST = BackwardPrefetch


class Block(nn.Module):
    """The unit of the wall-clock runs: 2.1 M parameters."""

    WIDTH = 1024

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(self.WIDTH, self.WIDTH)
        self.down = nn.Linear(self.WIDTH, self.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Chain(nn.Module):
    """Blocks in a row; the root owns a gain, so that inputs need gradients."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(Block.WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same."""
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return x


class Roberta(nn.Module):
    """The shapes of RoBERTa-large with a tied head: 355 M parameters, 1.4 GB."""

    def __init__(self, layers: int = 24, width: int = 1024, vocab: int = 50265) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(514, width)
        self.blocks = nn.ModuleList(TinyBlock(width, 16) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``(batch, time)`` to logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


Model = Chain | Roberta
Shard = Callable[[Model], nn.Module]


def _ours(mode: BackwardPrefetch | None, ahead: bool, model: Model) -> nn.Module:
    options: dict[str, Any] = {"backward_prefetch": mode, "forward_prefetch": ahead}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _fsdp1(mode: TorchPrefetch | None, ahead: bool, model: Model) -> nn.Module:
    return FSDP1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block, TinyBlock}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        backward_prefetch=mode,
        forward_prefetch=ahead,
    )


def _fsdp2(mesh: Any, asynchronous: bool, model: Model) -> nn.Module:
    for block in model.blocks:
        fsdp2_fully_shard(block, mesh=mesh)
    sharded = fsdp2_fully_shard(model, mesh=mesh)
    if asynchronous:
        sharded._set_unshard_async_op(True)
    return model


@dataclass(frozen=True)
class Way:
    """One library with one setting of its prefetch."""

    name: str
    shard: Shard
    ours: tuple[BackwardPrefetch | None, bool] | None = None

    def planned(self, model: Model, device_type: str) -> int | None:
        """The peak that our planner says of it, of ours only."""
        if self.ours is None:
            return None
        mode, ahead = self.ours
        blocks = ModuleWrapPolicy({Block, TinyBlock})
        options: dict[str, Any] = {"backward_prefetch": mode, "forward_prefetch": ahead}
        made = plan(model, world_size=WORLD, policy=blocks, **options)
        return made.peak(device_type=device_type).total


def ways(*, streams: bool) -> list[Way]:
    """All settings; needs a process group. Without streams FSDP2 has one more."""
    mesh = init_device_mesh("cpu", (WORLD,))
    settings: list[tuple[str, BackwardPrefetch | None, bool]] = [
        ("ours PRE, forward", PRE, True),
        ("ours PRE", PRE, False),
        ("ours POST", POST, False),
        ("ours none", None, False),
    ]
    if streams:
        del settings[0]  # the host runs ahead: nothing left to prefetch
    ours = [
        Way(name, partial(_ours, mode, ahead), (mode, ahead))
        for name, mode, ahead in settings
    ]
    peers = [
        Way("fsdp1 PRE", partial(_fsdp1, TorchPrefetch.BACKWARD_PRE, not streams)),
        Way("fsdp2", partial(_fsdp2, mesh, False)),
    ]
    if not streams:
        peers.append(Way("fsdp2 async", partial(_fsdp2, mesh, True)))
    return [*ours, *peers]
