"""A forward that runs modules in another order than the model registers them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import forecast, plan, simulate
from composable_fsdp.tools import measure_activations

UNITS = ["text", "text.*", "vision", "vision.*"]


class TwoTowers(nn.Module):
    """Runs vision before text, and registers text first, as CLIP does."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("text", "vision"):
            layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
            self.add_module(name, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 64)`` to a number; vision saves most."""
        towers = dict(self.named_children())
        image: Tensor = towers["vision"](x.repeat(40, 1)).sum(0)
        words: Tensor = towers["text"](x)
        return (words * image).sum()


@pytest.mark.req("N-02", "U-08")
def test_the_forecast_follows_the_order_of_the_measured_forward() -> None:
    """The order in which a model registers its towers changes no moment of a step."""
    batch = torch.zeros(8, 64)
    forecasts = []
    for registered in (("vision", "text"), ("text", "vision")):
        with torch.device("meta"):
            model = TwoTowers(*registered)
        planned = plan(model, world_size=4, units=UNITS)
        saved = measure_activations(model, planned, [batch])
        forecasts.append(forecast(planned, optimizer="none", activations=saved))
    real = simulate(model, world_size=4, batch=batch, units=UNITS, optimizer="none")

    expected, found = forecasts

    names = [unit.fqn for unit in found.plan.units]
    assert names.index("vision.0") < names.index("vision.2") < names.index("text")
    assert [each.memory for each in found.moments] == [
        each.memory for each in expected.moments
    ]
    assert found.peak.when == real.peak.when
    assert found.total == pytest.approx(real.peak.memory.total, rel=0.05)
    # A plan without a batch knows the modules alone, and the units are the same.
    assert [unit.fqn for unit in planned.units][1:3] == ["text", "text.0"]
    assert sorted(names) == sorted(unit.fqn for unit in planned.units)
    assert found.plan.traffic == planned.traffic
