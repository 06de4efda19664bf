"""Training under the Trainer of Lightning equals training on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations_env.lightning_world import (
    QUIET,
    Lit,
    as_torchrun,
    fitted,
    plain,
    require_equal,
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
