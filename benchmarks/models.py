"""Models of full size, to be built under fake tensors or on meta.

``Gpt()`` has 1.04 B parameters in 20 blocks; ``Llama()`` the shapes of Llama-3-405B.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.tiny import TinyBlock


class Gpt(nn.Module):
    """Embedding, blocks, norm and head: ``(batch, time)`` tokens to logits."""

    def __init__(
        self, layers: int = 20, width: int = 2048, heads: int = 16, vocab: int = 8192
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(TinyBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, time, vocab)``."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


class LlamaBlock(nn.Module):
    """Grouped-query attention and gated MLP, ``(batch, time, width)`` to the same."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        narrow = kv_heads * self.size
        self.norm_1 = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, narrow, bias=False)
        self.v = nn.Linear(width, narrow, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the past, then mix within each position (no rotation)."""
        batch, time, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (
            part(y).view(batch, time, -1, self.size).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + cast(Tensor, self.o(mixed.transpose(1, 2).reshape(x.shape)))
        y = self.norm_2(x)
        return x + cast(Tensor, self.down(F.silu(self.gate(y)) * self.up(y)))


class Llama(nn.Module):
    """Embedding, blocks, norm and head: ``(batch, time)`` tokens to logits."""

    def __init__(
        self,
        layers: int = 126,
        width: int = 16384,
        hidden: int = 53248,
        heads: int = 128,
        kv_heads: int = 8,
        vocab: int = 128256,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, hidden, heads, kv_heads) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, time, vocab)``."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))
