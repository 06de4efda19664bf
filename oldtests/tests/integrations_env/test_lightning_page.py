"""The code blocks of docs/lightning.md run, one after the other, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations_env.lightning_world import QUIET, as_torchrun
from tests.support.world import World
from tests.test_pages import fragments

pytestmark = QUIET


class Block(nn.Linear):
    """A layer that repeats."""


class Model(nn.Module):
    """The model of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class LitModel(L.LightningModule):
    """The module of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Model | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Model()

    def training_step(self, batch: Any, index: int) -> Tensor:
        assert self.model is not None
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_the_blocks_of_the_page_run(
    one_rank: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block, after those above it."""
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 4, (8,)))
    names: dict[str, Any] = {
        "Block": Block,
        "LitModel": LitModel,
        "Model": Model,
        "loader": DataLoader(cast(Any, data), 4),
        "torch": torch,
    }
    found = fragments("docs/lightning.md")

    with as_torchrun(one_rank):
        for block in found:
            block.run(names)

    assert len(found) == 6
    assert {"last.ckpt", "shards.ckpt", "whole.ckpt"} <= {
        each.name for each in tmp_path.iterdir()
    }
    assert names["left"] == {"epoch": 1}
