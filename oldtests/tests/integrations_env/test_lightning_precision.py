"""``precision=`` of the Trainer, over sharded modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from composable_fsdp import ShardedGradScaler
from composable_fsdp.errors import CompositionError
from composable_fsdp.lightning import (
    ComposableFSDPFabricStrategy,
    ComposableFSDPStrategy,
    ShardedPrecision,
)
from tests.integrations_env.lightning_world import (
    QUIET,
    Lit,
    as_torchrun,
    fitted,
    loader,
    plain,
    require_equal,
    trainer,
    weights,
)
from tests.support.on_ranks import on_ranks
from tests.support.world import World

pytestmark = QUIET

BF16 = torch.bfloat16
FORMS = {
    # precision: dtype of weights, of logits, and the tolerance beside one device
    "32-true": (torch.float32, torch.float32, 1e-6),
    "bf16-mixed": (torch.float32, BF16, 2e-2),
    "bf16-true": (BF16, BF16, 5e-2),
    "64-true": (torch.float64, torch.float64, 1e-12),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("where", ["init", "hook"])
@pytest.mark.parametrize("precision", FORMS)
def test_each_precision_trains_close_to_one_device(
    world: World, precision: str, where: str
) -> None:
    """Weights and logits have the dtypes that Lightning gives them without shards."""
    held, computed, atol = FORMS[precision]
    options: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.5}
    reference = Lit(where)
    plain(reference, **options)

    with as_torchrun(world):
        module = Lit(where)
        together = fitted(world, module, "composable_fsdp", **options)

    assert together.precision == precision
    assert module.seen == reference.seen
    assert set(module.seen.values()) == {computed}
    assert {value.dtype for value in weights(module).values()} == {held}
    require_equal(weights(module), weights(reference), atol)


class Targets(Lit):
    """Has a target in floating point beside the input."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        self.seen["x"], self.seen["y"] = x.dtype, y.dtype
        logits: Tensor = self(x)
        return nn.functional.mse_loss(logits.float().mean(-1), y.float())


@on_ranks(2)
def test_mixed_precision_casts_inputs_of_modules_and_no_targets(world: World) -> None:
    """The step sees the batch in its own dtype, and the network computes in bf16."""
    with as_torchrun(world):
        module = Targets()
        together = trainer("composable_fsdp", 2, precision="bf16-mixed", max_steps=1)
        data: Any = [(x, y.float()) for x, y in loader(2, world.rank)]
        together.fit(module, DataLoader(data, batch_size=None))

    assert module.seen == {"x": torch.float32, "y": torch.float32}


class Poisoned(Lit):
    """Gives rank 1 an infinite gradient in its own shard, at batch 1."""

    rank = 0

    def on_after_backward(self) -> None:
        assert self.net is not None
        grad = self.net.head.weight.grad
        if self.rank == 1 and self.trainer.fit_loop.batch_idx == 1 and grad is not None:
            grad.fill_(float("inf"))


@on_ranks(2)
def test_ranks_skip_a_step_together_when_one_gradient_overflows(world: World) -> None:
    """The scaler of 16-mixed decides alike, and its settings are the user's."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with as_torchrun(world):
        module = Poisoned()
        module.rank = world.rank
        together = fitted(
            world,
            module,
            "composable_fsdp",
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            max_epochs=1,
        )

    used = together.precision_plugin.scaler
    assert isinstance(used, ShardedGradScaler)
    assert used.get_scale() == 4.0
    found = weights(module)
    assert all(value.isfinite().all() for value in found.values())
    assert not torch.equal(found["net.head.bias"], weights(Lit())["net.head.bias"])


def test_a_plugin_without_a_counterpart_is_refused_by_name() -> None:
    """The message has the values that work; a class of the user may derive."""

    class Own(ShardedPrecision):
        pass

    class Foreign(MixedPrecision):
        pass

    own = Own()
    foreign = Foreign("bf16-mixed", "cpu")

    assert trainer(ComposableFSDPStrategy(), 1, plugins=[own]).precision_plugin is own
    with pytest.raises(CompositionError, match=r"plugin Foreign .*bf16-mixed.*derive"):
        trainer("composable_fsdp", 1, plugins=[foreign])
    with pytest.raises(CompositionError, match="plugin Foreign "):
        ComposableFSDPFabricStrategy(precision=foreign)
    mixed = FabricMixed("16-mixed", "cpu")
    ComposableFSDPFabricStrategy(precision=mixed)
    assert isinstance(mixed.scaler, ShardedGradScaler)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"auto_wrap_policy": None}, r"auto_wrap_policy \(here: policy\)"),
        ({"sharding_strategy": 1}, r"sharding_strategy \(here: strategy\)"),
        ({"polcy": None}, r"polcy \(did you mean policy\?\)"),
        ({"activation_checkpointing_policy": 1}, r"here: checkpoint\(block\)"),
    ],
)
@pytest.mark.parametrize("kind", [ComposableFSDPStrategy, ComposableFSDPFabricStrategy])
def test_unknown_arguments_are_refused_at_once(
    kind: Any, given: dict[str, Any], message: str
) -> None:
    """Names of Lightning's FSDPStrategy are translated, others get the nearest."""
    with pytest.raises(TypeError, match=message):
        kind(**given)
    with pytest.raises(ValueError, match=r"'full' \(a file\) or 'sharded'"):
        kind(state_dict_type="shard")
