"""Strategies of Lightning that would take shards for whole parameters are refused."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

from composable_fsdp.errors import CompositionError
from tests.integrations_env.lightning_world import (
    QUIET,
    Lit,
    Net,
    as_torchrun,
    fitted,
    loader,
    plain,
    require_equal,
    seeded,
    trainer,
    weights,
)
from tests.support.on_ranks import on_ranks
from tests.support.world import World

pytestmark = QUIET


class OnCPU(FSDPStrategy):
    """Lightning's strategy, which refuses a CPU by its exact type."""


STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": OnCPU,
    "parallel": lambda: ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_foreign_strategy_around_units_is_refused_with_the_way_out(
    world: World, name: str, stage: str
) -> None:
    """Before anything is sent: the shards are unchanged."""
    with as_torchrun(world):
        module = Lit("by hand")
        module.configure_model()
        before = weights(module)
        run = getattr(trainer(STRATEGIES[name](), 2), stage)
        with pytest.raises(CompositionError) as error:
            run(module, loader(2, world.rank))

    told = str(error.value)
    assert " was put around a Lit whose parameter 'net.layers.0" in told
    assert (
        'import composable_fsdp.lightning and pass strategy="composable_fsdp"' in told
    )
    require_equal(weights(module), before, 0)
    # The way out.
    with as_torchrun(world):
        fitted(world, module, "composable_fsdp")
    reference = Lit()
    plain(reference)
    require_equal(weights(module), weights(reference))


class Loose(L.LightningModule):
    """Optimizes by hand, with a parameter of its own."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = seeded(Net), seeded(Net)
        if tied:
            self.second.head.weight = self.first.head.weight
        else:
            self.scale = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, index: int) -> None:
        """Do nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@on_ranks(2)
def test_parameters_outside_of_children_are_told_when_optimized_by_hand(
    world: World,
) -> None:
    """No forward would gather them; ties between children have no root above."""
    held_twice = Loose()
    held_twice.scale = held_twice.first.head.weight
    with as_torchrun(world):
        for module in (Loose(), held_twice):
            with pytest.raises(CompositionError, match=r"'scale' belong to no child"):
                fitted(world, module, "composable_fsdp")
        with pytest.raises(
            CompositionError, match=r"'first.head.weight' belong .* several"
        ):
            fitted(world, Loose(tied=True), "composable_fsdp")
