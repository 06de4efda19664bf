"""Weights that change between a forward and its backward are refused by name.

Plain torch raises for writes that it counts, which programs of `property_tests` make,
and computes with the new weights after others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    unshard_params,
)
from tests.support.on_ranks import on_ranks
from tests.support.sharded import message_of
from tests.support.world import World

DOUBLE = MixedPrecision(param_dtype=torch.float64)
KINDS: dict[str, dict[str, Any]] = {
    **{
        kind: {"strategy": ShardingStrategy[kind]}
        for kind in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    },
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "mixed": {"mixed_precision": DOUBLE},
    "mixed_kept": {
        "mixed_precision": DOUBLE,
        "strategy": ShardingStrategy.SHARD_GRAD_OP,
    },
}


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Tripled(torch.optim.Optimizer):
    """Writes as kernels of other libraries do, which autograd does not count."""

    __module__ = "elsewhere"

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(3.0)


@pytest.mark.req("X-32")
@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_autograd_does_not_count_is_refused_by_name(
    world: World, kind: str
) -> None:
    """On all ranks alike; the next step is right again."""
    for write in ("fused", "unknown", "assigned"):
        model = plain()
        for layer in (model[0], model[2]):
            fully_shard(layer, **KINDS[kind])
        fully_shard(model, **KINDS[kind])
        parameters = list(model.parameters())
        optim: Any = torch.optim.Adam(parameters, lr=0.1, fused=True)
        if write == "unknown":
            optim = Tripled(parameters, {})
        model(torch.ones(2, 4)).sum().backward()
        loss = model(torch.ones(2, 4)).square().sum()
        if write == "assigned":
            values = {name: value + 1 for name, value in plain().state_dict().items()}
            model.load_state_dict(values, assign=True)
        else:
            optim.step()
        text = message_of(loss.backward)
        assert "Backward needs a tensor as it was in the forward" in text, (write, text)
        assert "'2.weight'" in text, (write, text)
        optim.zero_grad()
        x = torch.ones(2, 4)
        model(x).square().sum().backward()
        assert_gradients_of(model, x)


def assert_gradients_of(model: nn.Module, x: Tensor) -> None:
    """Full gradients equal those of a plain model of the values of now."""
    reference = plain()
    reference.load_state_dict(model.state_dict())
    reference(x).square().sum().backward()
    with unshard_params(model, writeback=False, with_grads=True):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        for ours, theirs in pairs:
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad)
