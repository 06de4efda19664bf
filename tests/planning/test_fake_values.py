"""Integers on fake tensors keep values, so that a router's choices have shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import forecast, plan, simulate
from composable_fsdp.tools import measure_activations

EXPERTS, CHOSEN, TOKENS, WIDTH = 4, 2, 64, 32


class Experts(nn.Module):
    """Sends each token to two of four experts, by the places of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(tokens, width)`` to the same."""
        weight, chosen = self.router(x).softmax(-1).topk(CHOSEN, dim=-1)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        result = torch.zeros_like(x)
        for index in mask.sum((1, 2)).nonzero().flatten().tolist():
            rank, token = torch.where(mask[index])
            self.sizes.append(len(token))
            output = self.experts[index](x[token]) * weight[token, rank, None]
            result = result.index_add(0, token, output)
        return x + result


def model() -> nn.Sequential:
    """A layer of experts."""
    return nn.Sequential(Experts())


@pytest.mark.req("N-02", "U-08")
def test_a_mixture_of_experts_is_planned_and_simulated() -> None:
    """Each expert gets an equal share, and both ways count the same bytes."""
    with torch.device("meta"):
        whole = model()
    batch = torch.zeros(TOKENS, WIDTH)

    found = simulate(whole, world_size=4, batch=batch, units=["*"], optimizer="none")
    planned = plan(whole, world_size=4, units=["*"])
    saved = measure_activations(whole, planned, [batch])

    total = forecast(planned, optimizer="none", activations=saved).total
    assert found.peak.memory.total == pytest.approx(total, rel=0.01)
    layer = whole[0]
    assert isinstance(layer, Experts)
    assert set(layer.sizes) == {TOKENS * CHOSEN // EXPERTS}
