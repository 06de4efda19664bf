"""A byte-level GPT in plain PyTorch: it knows nothing of sharding.

No ``Linear`` has a bias. A bias on the attention keys has a true gradient of zero, so
Adam would scale its rounding noise up to whole steps, and no two runs that add in a
different order could agree on it.
"""

from __future__ import annotations

import math

import torch
from lm_text import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 128
LAYERS = 5
HEADS = 4


Turns = tuple[Tensor, Tensor]
"""Cosines and sines by place, ``(context, WIDTH // HEADS // 2)`` each."""


def turns_of(context: int, device: torch.device) -> Turns:
    """Rotary positions: how far each pair of channels turns at each place.

    With learned positions the model would first have to find out what "the byte before"
    means; at this size that takes more steps than the demo has.
    """
    pairs = WIDTH // HEADS // 2
    speeds = 1000.0 ** (-torch.arange(pairs, device=device) / pairs)
    angles = torch.arange(context, device=device)[:, None] * speeds
    return angles.cos(), angles.sin()


def turned(x: Tensor, turns: Turns) -> Tensor:
    """``(batch, heads, context, WIDTH // HEADS)`` turned place by place."""
    (cos, sin), (a, b) = turns, x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention, then a two-layer network; each behind a norm, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.network_norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        """``(batch, context, WIDTH)`` to the same."""
        x = x + self.attend(self.attention_norm(x), turns)
        hidden = F.gelu(self.up(self.network_norm(x)))
        out: Tensor = x + self.down(hidden)
        return out

    def attend(self, x: Tensor, turns: Turns) -> Tensor:
        """Causal attention over ``(batch, context, WIDTH)``."""
        batch, context, _ = x.shape
        heads = self.query_key_value(x).view(batch, context, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = turned(query, turns), turned(key, turns)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.mix(y.transpose(1, 2).reshape(batch, context, WIDTH))
        return mixed


class GPT(nn.Module):
    """Logits of the next byte, with a head of its own (not tied to the embedding)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                continue
            std = 0.02 if "blocks" not in name else parameter.shape[1] ** -0.5
            if name.endswith(("mix.weight", "down.weight")):
                # These are added to the residual stream, twice per block.
                std /= math.sqrt(2 * LAYERS)
            parameter.normal_(std=std)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, context)`` bytes to ``(batch, context, VOCABULARY)`` logits."""
        turns = turns_of(x.shape[1], x.device)
        h = self.bytes(x)
        for block in self.blocks:
            h = block(h, turns)
        logits: Tensor = self.head(self.norm(h))
        return logits


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per byte over ``(batch, context)`` inputs and targets, 0-d."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    length: int,
    *,
    context: int,
    device: torch.device,
    seed: int,
) -> str:
    """Sample ``length`` bytes after ``prompt``.

    Every forward gathers the parameters, so all ranks call this together and take the
    same number of steps; with the same seed they also write the same text.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(text[:, -context:].to(device))[0, -1].float().cpu()
        chances = (logits / 0.7).softmax(-1)
        following = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat((text, following[None]), dim=1)
    written = bytes(text[0].tolist()).decode(errors="replace")
    # A model that has learned little writes control characters too: not for a terminal.
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in written)
