"""Train the language model of train_lm.py with Lightning's Trainer, sharded.

    torchrun --standalone --nproc-per-node 2 examples/lightning_lm.py

Each run trains some steps more: the second run goes on from the sharded checkpoint of
the first, on any number of ranks. At the end rank 0 loads the directory into a plain
module by ``load_from_checkpoint``, whose held-out loss is that of the sharded module.
"""

# example: --steps 20
# quick: --steps 3
# needs: lightning

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lm_model import GPT, loss_of
from lm_recipe import MAX_NORM, Recipe
from lm_text import Batch, Corpus, load_corpus
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from composable_fsdp.lightning import ComposableFSDPStrategy

GLOBAL_BATCH = 24
"""Windows of one step over all ranks: 1, 2, 3, 4, 6, 8, 12 or 24 of them."""
HELD_OUT_BATCHES = 4


class Windows(Dataset[Batch]):
    """This rank's share of the windows of each step, whatever the number of ranks."""

    def __init__(self, corpus: Corpus, recipe: Recipe, rank: int, ranks: int) -> None:
        self.corpus, self.recipe = corpus, recipe
        self.rank, self.ranks = rank, ranks

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> Batch:
        if step >= len(self):
            raise IndexError(step)
        inputs, targets = self.corpus.batch(
            GLOBAL_BATCH, self.recipe.context, seed=self.recipe.seed, step=step, rank=0
        )
        return inputs[self.rank :: self.ranks], targets[self.rank :: self.ranks]


class LanguageModel(L.LightningModule):
    """The GPT, its loss and its optimizer; nothing in it knows of sharding."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.recipe = Recipe(steps=steps, seed=0)
        self.model: GPT | None = None

    def configure_model(self) -> None:
        """Build the layers; the Trainer calls this hook again for each fit and test."""
        if self.model is None:
            self.model = GPT()

    def loss(self, batch: Batch) -> Tensor:
        """Mean nats per byte."""
        assert self.model is not None
        return loss_of(self.model, *batch)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a step."""
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """The loss on held-out text."""
        self.log("held_out", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over this rank's shards."""
        return self.recipe.optimizer(self.parameters())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Train as many steps again as the checkpoint has."""
        if self._trainer is not None:
            limit = checkpoint["global_step"] + self.recipe.steps
            self._trainer.fit_loop.epoch_loop.max_steps = limit


def held_out(corpus: Corpus, recipe: Recipe, rank: int, ranks: int) -> list[Batch]:
    """This rank's share of the held-out windows."""
    batches = corpus.held_out_batches(
        GLOBAL_BATCH, recipe.context, rank=0, world_size=1
    )
    chosen = [batch for batch, _ in zip(batches, range(HELD_OUT_BATCHES), strict=False)]
    return [(x[rank::ranks], y[rank::ranks]) for x, y in chosen]


def main() -> None:
    """Train, save, load into a plain module and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps of this run (40)")
    parser.add_argument("--folder", type=Path, default=Path("demo_out/lightning"))
    arguments = parser.parse_args()
    path = arguments.folder / "last.ckpt"
    L.seed_everything(0, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(
        strategy=ComposableFSDPStrategy(state_dict_type="sharded"),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=ranks // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        accelerator="gpu" if torch.cuda.device_count() >= ranks else "cpu",
        gradient_clip_val=MAX_NORM,
        max_epochs=-1,
        max_steps=arguments.steps,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LanguageModel(arguments.steps)
    corpus = load_corpus(
        file=None, stdlib=False, windows=GLOBAL_BATCH, context=module.recipe.context
    )
    share = (corpus, module.recipe, trainer.global_rank, trainer.world_size)
    batches = DataLoader(Windows(*share), batch_size=None)
    trainer.fit(module, batches, ckpt_path=path if path.exists() else None)
    trainer.save_checkpoint(path)
    (found,) = trainer.validate(
        module, DataLoader(cast(Any, held_out(*share)), batch_size=None), verbose=False
    )
    if trainer.is_global_zero:
        plain = LanguageModel.load_from_checkpoint(path, map_location="cpu")
        whole = held_out(corpus, module.recipe, 0, 1)
        with torch.no_grad():
            alone = float(torch.stack([plain.loss(each) for each in whole]).mean())
        print(
            f"{trainer.global_step} steps on {trainer.world_size} ranks: "
            f"held-out loss {found['held_out']:.4f} nats per byte, of the plain module "
            f"from {path} {alone:.4f}"
        )
        assert abs(found["held_out"] - alone) < 1e-3


if __name__ == "__main__":
    main()
