"""Llama as torchtitan had it in December 2024, at commit 2a44370: eager operations.

``torchtitan/models/llama/model.py``, with the selective checkpointing of
``parallelize_llama.py``, which runs each second matrix product again.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_MM = torch.ops.aten.mm.default
_SAVED = {_MM, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


def _contexts() -> Any:
    """Save attention, and the results of all matrix products but each second."""
    counts: defaultdict[bool, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[ctx.is_recompute] += func == _MM
        again = func == _MM and counts[ctx.is_recompute] % 2 == 0
        saves = func in _SAVED and not again
        policy = CheckpointPolicy
        return policy.MUST_SAVE if saves else policy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class Norm(nn.Module):
    """The operations of ``nn.RMSNorm`` in torch 2.6."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., width)`` to the same."""
        y = x.float()
        scaled = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Block(nn.Module):
    """A transformer block, which is checkpointed selectively."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.attention_norm, self.ffn_norm = Norm(4096), Norm(4096)
        self.wq, self.wo = linear(4096, 4096), linear(4096, 4096)
        self.wk, self.wv = linear(4096, 1024), linear(4096, 1024)
        self.w1, self.w3 = linear(4096, 14336), linear(4096, 14336)
        self.w2 = linear(14336, 4096)

    def _forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, time, _ = x.shape
        y = self.attention_norm(x)
        q, k, v = (m(y).view(batch, time, -1, 128) for m in (self.wq, self.wk, self.wv))
        q, k = _rotated(q, angles), _rotated(k, angles)
        k, v = (
            each.unsqueeze(3).expand(-1, -1, -1, 4, -1).reshape(batch, time, -1, 128)
            for each in (k, v)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).contiguous().view(batch, time, -1))
        y = self.ffn_norm(x)
        return x + cast(Tensor, self.w2(F.silu(self.w1(y)) * self.w3(y)))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map ``(batch, time, 4096)`` to the same."""
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return cast(Tensor, run(self._forward, x, angles, context_fn=_contexts))


class Llama(nn.Module):
    """Llama 3.1 8B with so many layers: ids ``(batch, time)`` to logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(128256, 4096)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = Norm(4096)
        self.output = nn.Linear(4096, 128256, bias=False)
        angles = torch.zeros(1, 8192, 1, 64, dtype=torch.complex64)
        self.angles: Tensor
        self.register_buffer("angles", angles)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``(batch, time, 128256)``."""
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.angles[:, : ids.shape[1]])
        return cast(Tensor, self.output(self.norm(x)))


def loss(logits: Tensor) -> Tensor:
    """Return the mean loss, in float32."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long))
