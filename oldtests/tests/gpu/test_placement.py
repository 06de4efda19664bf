"""The three ways to place a model, and inputs on the host, on a real GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import CPUOffload, fully_shard
from composable_fsdp.errors import PlanError
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.gpu.counts import NEEDS_NCCL
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World, single_rank_group

pytestmark = NEEDS_NCCL


class Nested(nn.Module):
    """Takes a dict of lists and adds a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, inputs: dict[str, list[Tensor]], *, more: Tensor) -> Tensor:
        """Sum of everything."""
        x = torch.stack(inputs["xs"]).sum(0) + more
        y: Tensor = self.norm(self.linear(x)) + self.shift
        return y


@pytest.mark.req("S2-09", "B-05")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "never"])
@on_ranks()
def test_the_three_styles_of_placing_a_model(
    world: World, when: str, offload: bool
) -> None:
    """Before sharding and never always work; after does, unless offloaded."""
    model: nn.Module = Nested()
    option = CPUOffload(offload_params=offload)
    if when == "before":
        model.to(world.device)
    model = fully_shard(model, cpu_offload=option)
    if when == "after":
        model.to(world.device)
    x = torch.ones(4, 8)

    if when == "after" and offload:
        with pytest.raises(PlanError, match=r"moved to cuda:\d+ after fully_shard"):
            model({"xs": [x, x]}, more=x)
        return
    y = model({"xs": [x, x]}, more=x)
    backward(y.sum())

    assert y.device == world.device
    assert all(b.device == world.device for b in model.buffers())
    home = torch.device("cpu") if offload else world.device
    for parameter in model.parameters():
        assert parameter.device == home
        assert (parameter.grad is None) == (not parameter.numel())
        if parameter.grad is not None:
            assert parameter.grad.device == home


@pytest.mark.req("B-07")
def test_a_model_on_gloo_that_is_moved_later_computes_on_the_gpu() -> None:
    """The CPU was only where the parameters were."""
    with single_rank_group():
        model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        with torch.no_grad():
            model(torch.ones(2, 8))
        model.cuda()
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
        plain.load_state_dict(model.state_dict())
        x = torch.ones(2, 8)

        for each in (model, plain):
            backward(each(x.cuda()).square().sum())

        assert all(h.layout.device.type == "cuda" for h in _get_fsdp_handles(model))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad.view_as(theirs), theirs.grad)
