"""Training under the Trainer of Lightning equals training on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from composable_fsdp import ShardingStrategy
from composable_fsdp.errors import CompositionError
from composable_fsdp.lightning import ComposableFSDPStrategy
from tests.integrations_env.lightning_world import (
    CLASSES,
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

CLIPS = {
    "unclipped": {},
    "by norm": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"},
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.req("S3-02", "S3-10")
@on_ranks(1, 2)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("where", ["init", "hook", "by hand"])
def test_fit_equals_one_device(
    world: World, where: str, clip: str, accumulate: int
) -> None:
    """Weights and logged losses are those of the plain module on the whole batch."""
    options: dict[str, Any] = {**CLIPS[clip], "accumulate_grad_batches": accumulate}
    reference = Lit("init")
    alone = plain(reference, **options)

    with as_torchrun(world):
        module = Lit(where)
        together = fitted(world, module, "composable_fsdp", **options)

    require_equal(weights(module), weights(reference))
    for name in ("train_loss_epoch", "val_loss"):
        torch.testing.assert_close(
            together.callback_metrics[name], alone.callback_metrics[name]
        )


@pytest.mark.req("S3-12")
@on_ranks(2)
@pytest.mark.parametrize(
    "strategy",
    ["composable_fsdp_offload", "composable_fsdp_hybrid", "mesh", "one unit"],
)
def test_each_name_and_shape_of_sharding_trains_alike(
    world: World, strategy: str
) -> None:
    """Presets, a mesh by its shape and a policy of the user give the plain weights."""
    made = {
        "mesh": lambda: ComposableFSDPStrategy(
            device_mesh=(2, 1), strategy=ShardingStrategy.HYBRID_SHARD
        ),
        "one unit": lambda: ComposableFSDPStrategy(policy=None),
    }
    reference = Lit()
    plain(reference)

    with as_torchrun(world):
        module = Lit()
        fitted(world, module, made[strategy]() if strategy in made else strategy)

    require_equal(weights(module), weights(reference))


@pytest.mark.req("S3-09")
@on_ranks(2)
def test_layers_on_meta_start_with_the_weights_of_the_first_rank(world: World) -> None:
    """Rank 0 initializes; all ranks hold its values and train."""
    with as_torchrun(world):
        module = Lit("meta")
        torch.manual_seed(world.rank)
        fitted(world, module, "composable_fsdp", max_steps=2)

    found = weights(module)
    assert all(value.isfinite().all() for value in found.values())
    assert found["net.head.weight"].std() > 0.05
    same = found["net.layers.0.weight"].clone()
    torch.distributed.broadcast(same, 0)
    assert torch.equal(same, found["net.layers.0.weight"])


@pytest.mark.req("S3-03")
@on_ranks(1, 2)
def test_evaluation_in_any_order_around_fit_equals_one_device(world: World) -> None:
    """validate, fit with sanity checks, test, predict, validate, fit again."""
    options = {"num_sanity_val_steps": 2}
    alone, reference = trainer("auto", 1, **options), Lit()
    before = alone.validate(reference, loader(), verbose=False)
    alone.fit(reference, loader(), loader())
    tested = alone.test(reference, loader(), verbose=False)

    with as_torchrun(world):
        module = Lit()
        together = trainer("composable_fsdp", world.world_size, **options)
        each = loader(world.world_size, world.rank)
        assert_metrics(together.validate(module, each, verbose=False), before)
        together.fit(module, each, each)
        assert_metrics(together.test(module, each, verbose=False), tested)
        predicted = together.predict(module, each)
        require_equal(weights(module), weights(reference))
        # A Trainer of its own, as a script for evaluation has.
        again = trainer("composable_fsdp", world.world_size, **options)
        assert_metrics(again.test(module, each, verbose=False), tested)
        again.fit(module, each)

    assert predicted is not None
    shown: Any = torch.cat([each for each in predicted if isinstance(each, Tensor)])
    expected: Any = torch.cat(alone.predict(reference, loader()) or [])
    assert torch.equal(shown, expected[world.rank :: world.world_size])


def assert_metrics(found: Any, expected: Any) -> None:
    """Compare the metrics of an evaluation."""
    assert found[0].keys() == expected[0].keys()
    assert found[0] == pytest.approx(expected[0], abs=1e-6)


class Scored(Lit):
    """Counts with a metric that holds a network, and with an accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.judge = Judge()

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.judge(logits)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("judged", self.judge, on_epoch=True)


class Judge(Metric):
    """A metric with parameters, as those over embeddings have."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = seeded(lambda: torch.nn.Linear(CLASSES, 1)).requires_grad_(False)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor) -> None:
        """Add the outputs of the network."""
        self.total += self.network(logits).sum()

    def compute(self) -> Tensor:
        """Return the sum."""
        return self.total


@pytest.mark.req("S3-07")
@on_ranks(2)
def test_metrics_keep_their_parameters_and_count_over_all_ranks(world: World) -> None:
    """A metric's network stays whole, and the values are those of one device."""
    reference = Scored()
    # The plain run is alone, and must not add up the copies of it on the ranks.
    reference.judge.sync_on_compute = reference.accuracy.sync_on_compute = False
    alone = plain(reference)

    with as_torchrun(world):
        module = Scored()
        network = module.judge.network
        together = fitted(world, module, "composable_fsdp")

    assert module.judge.network is network
    assert network.weight.shape == (1, CLASSES)
    assert module.net is not None
    assert module.net.head.weight.shape[0] < CLASSES
    for name in ("accuracy", "judged"):
        torch.testing.assert_close(
            together.callback_metrics[name], alone.callback_metrics[name]
        )


@on_ranks(2)
def test_the_trainer_gives_each_rank_its_part_of_the_data(world: World) -> None:
    """Lightning's own sampler is told the ranks."""
    with as_torchrun(world):
        together = trainer(
            "composable_fsdp", 2, use_distributed_sampler=True, max_epochs=1
        )
        together.fit(Lit(), DataLoader(loader().dataset, 4))

    sampler: Any = together.train_dataloader.sampler
    assert (sampler.num_replicas, sampler.rank) == (2, world.rank)


class Pair(L.LightningModule):
    """Two networks with an optimizer each, stepped by hand in turn."""

    def __init__(self, toggle: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.maker = seeded(lambda: Net())
        self.judge = seeded(lambda: torch.nn.Linear(CLASSES, 3))

    def forward(self, x: Tensor) -> Any:
        return self.judge(self.maker(x))

    def training_step(self, batch: Any, index: int) -> None:
        x, _ = batch
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            loss = (self(x) - number).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.maker.parameters(), 0.1),
            torch.optim.AdamW(self.judge.parameters(), 0.01),
        )


@on_ranks(1, 2)
@pytest.mark.parametrize("toggle", [False, True])
def test_several_optimizers_stepped_by_hand_equal_one_device(
    world: World, toggle: bool
) -> None:
    """Backward and steps inside of training_step, with parameters frozen in turn."""
    reference = Pair(toggle)
    trainer("auto", 1).fit(reference, loader())

    with as_torchrun(world):
        module = Pair(toggle)
        together = trainer("composable_fsdp", world.world_size)
        together.fit(module, loader(world.world_size, world.rank))

    require_equal(weights(module), weights(reference))


@on_ranks(2)
def test_a_fit_with_other_settings_is_refused_and_an_equal_fit_is_not(
    world: World,
) -> None:
    """The second strategy finds the units of the first."""
    with as_torchrun(world):
        module = Lit()
        fitted(world, module, "composable_fsdp", max_epochs=1)
        before = weights(module)
        fitted(world, module, ComposableFSDPStrategy(), max_epochs=1)
        with pytest.raises(CompositionError, match="with other settings"):
            fitted(world, module, ComposableFSDPStrategy(forward_prefetch=True))

    assert not torch.equal(before["net.head.bias"], weights(module)["net.head.bias"])
