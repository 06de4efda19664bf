"""Two models that train in milliseconds: an MLP, and what a GPT asks of sharding.

Equal arguments give equal values. They are drawn on the CPU from a generator of the
model's own and honour ``with torch.device("meta")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def _default_generators_kept() -> Iterator[None]:
    """Let modules draw initial values that nobody will see.

    To make them on meta and then empty would draw nothing, and take three times as
    long: a meta tensor is initialised in Python.
    """
    is_cuda = torch.get_default_device().type == "cuda"
    with torch.random.fork_rng([torch.cuda.current_device()] if is_cuda else []):
        yield


@torch.no_grad()
def _set_values(module: nn.Module, seed: int) -> None:
    """Give every parameter a value; the gains of norms lie around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in module.named_parameters():
        value = torch.randn(param.shape, generator=generator, device="cpu") * 0.2
        is_gain = "norm" in name and name.endswith("weight")
        param.copy_(value + 1 if is_gain else value)


def tiny_mlp(width: int = 8, *, hidden: int = 12, seed: int = 0) -> nn.Sequential:
    """Build ``Linear, ReLU, Linear`` from ``(batch, width)`` to ``(batch, width)``."""
    with _default_generators_kept():
        model = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)
        )
    _set_values(model, seed)
    return model


class TinyBlock(nn.Module):
    """Pre-norm causal attention and MLP, ``(batch, time, width)`` to the same."""

    def __init__(
        self, width: int, heads: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, device=device)
        self.qkv = nn.Linear(width, 3 * width, device=device)
        self.out = nn.Linear(width, width, device=device)
        self.norm_2 = nn.LayerNorm(width, device=device)
        self.up = nn.Linear(width, 4 * width, device=device)
        self.down = nn.Linear(4 * width, width, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the past, then mix within each position."""
        batch, time, width = x.shape
        heads = (batch, time, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=-1)
        q, k, v = (part.view(heads).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + cast(Tensor, self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.norm_2(x)))))


class TinyGPT(nn.Module):
    """Token and position embeddings, blocks, norm, head; logits per position.

    ``tied_head=True`` makes the head's weight the token embedding's.

    Raises: ValueError, if ``heads`` does not divide ``width``.
    """

    def __init__(
        self,
        vocab: int = 17,
        width: int = 8,
        layers: int = 2,
        heads: int = 2,
        context: int = 6,
        *,
        tied_head: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}.")
        with _default_generators_kept():
            self.tokens = nn.Embedding(vocab, width)
            self.positions = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(TinyBlock(width, heads) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocab, bias=False)
        if tied_head:
            self.head.weight = self.tokens.weight
        _set_values(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``(batch, time)`` to logits ``(batch, time, vocab)``."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(where)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))
