"""Lightning on the ranks of a pool, models for its tests, and the plain run beside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import composable_fsdp.lightning  # registers the names
from tests.integrations_env.torchrun import torchrun_variables
from tests.support.world import World

WIDTH, CLASSES, SAMPLES = 12, 5, 32

QUIET = [
    # Of few workers, small data and the like.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    # Of what Lightning itself calls.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
"""The warnings of Lightning; those of this package are errors."""


def as_torchrun(world: World) -> AbstractContextManager[None]:
    """Let Lightning find the ranks of the pool, as it finds those of torchrun."""
    return torchrun_variables(world, GROUP_RANK="0", TORCHELASTIC_RUN_ID="pool")


class Net(nn.Module):
    """Three layers of which two repeat, with uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return cast(Tensor, self.head(self.norm(x)))


class Lit(L.LightningModule):
    """A classifier whose layers are made in ``__init__`` or in ``configure_model``."""

    def __init__(
        self, where: str = "init", lr: float = 0.1, adam: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.where, self.lr, self.adam = where, lr, adam
        self.net: Net | None = None
        self.seen: dict[str, Any] = {}
        if where == "init":
            self.net = seeded(Net)

    def configure_model(self) -> None:
        if self.net is not None:
            return
        if self.where == "meta":
            with torch.device("meta"):
                self.net = Net()
        else:
            self.net = seeded(Net)
        if self.where == "by hand":
            for layer in self.net.layers:
                composable_fsdp.fully_shard(layer)

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return cast(Tensor, self.net(x))

    def _loss(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        logits = self(x)
        self.seen[name] = logits.dtype
        loss = nn.functional.cross_entropy(logits.float(), y)
        self.log(name, loss, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self._loss(batch, "train_loss")

    def validation_step(self, batch: Any, index: int) -> None:
        self._loss(batch, "val_loss")

    def test_step(self, batch: Any, index: int) -> None:
        self._loss(batch, "test_loss")

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return cast(Tensor, self(batch[0])).argmax(-1)

    def configure_optimizers(self) -> Any:
        kind: Any = torch.optim.AdamW if self.adam else torch.optim.SGD
        optimizer = kind(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def seeded(make: Callable[[], Any]) -> Any:
    """Return ``make()`` from a fixed seed; the random state of the caller stays."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


def loader(ranks: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return this rank's part of batches of 8, which are the same at any size."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    data = TensorDataset(x, y)
    sampler: Any = DistributedSampler(data, ranks, rank, shuffle=False)
    return DataLoader(data, 8 // ranks, sampler=sampler)


def trainer(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    """Return a quiet Trainer on CPUs."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "max_epochs": 2,
    }
    return L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, **{**quiet, **options}
    )


def plain(module: L.LightningModule, **options: Any) -> L.Trainer:
    """Fit ``module`` on one device with the whole batch; return the Trainer."""
    alone = trainer("auto", 1, **options)
    alone.fit(module, loader(), loader())
    return alone


def fitted(
    world: World, module: L.LightningModule, strategy: Any, **options: Any
) -> L.Trainer:
    """Fit ``module`` on the ranks of ``world``; return the Trainer."""
    together = trainer(strategy, world.world_size, **options)
    each = loader(world.world_size, world.rank)
    together.fit(module, each, each)
    return together


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict. Collective: as ``state_dict``."""
    state = module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def require_equal(
    found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6
) -> None:
    """Compare two state dicts by name."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0)
