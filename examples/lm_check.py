"""The same training without sharding, in one process, to compare the first steps with.

Each rank keeps a whole plain model and computes the batches of *all* ranks on it, one
after the other; the mean of their gradients is what data parallel training would use.
Nothing here communicates or imports composable_fsdp.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lm_model import loss_of
from lm_recipe import MAX_NORM, Recipe
from lm_text import Corpus
from torch import Tensor, nn

CHECKED_STEPS = 20
TOLERANCE = 1e-5
DEFINITION = "|a - b| / |b| of every loss, norm(a - b) / norm(b) of every parameter"


class PlainTraining:
    """The unsharded model, one step at a time.

    ``losses`` and ``weights`` are the largest relative differences so far, as
    ``DEFINITION`` says, a being the sharded run.
    """

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        recipe: Recipe,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self.model = model
        self.corpus = corpus
        self.recipe = recipe
        self.rank = rank
        self.world_size = world_size
        self.optimizer = recipe.optimizer(model.parameters())
        self.losses = 0.0
        self.weights = 0.0

    def step(self, step: int) -> float:
        """Take one step on the batches of all ranks; return the loss of this rank's."""
        recipe = self.recipe
        device = next(self.model.parameters()).device
        own = 0.0
        for rank in range(self.world_size):
            inputs, targets = self.corpus.batch(
                recipe.batch, recipe.context, seed=recipe.seed, step=step, rank=rank
            )
            loss = loss_of(self.model, inputs.to(device), targets.to(device))
            loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
            if rank == self.rank:
                own = loss.item()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.world_size
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        recipe.set_learning_rate(self.optimizer, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return own

    def compare(self, step: int, loss: float, weights: Mapping[str, Tensor]) -> None:
        """Take the step; note how far ``loss`` and the full ``weights`` are from it."""
        expected = self.step(step)
        self.losses = _largest(self.losses, abs(loss - expected) / abs(expected))
        for name, plain in self.model.state_dict().items():
            # A norm and not single elements: where a gradient is all but zero, Adam
            # scales its rounding noise up to a visible step.
            distance = (weights[name].to(plain.device) - plain).norm() / plain.norm()
            self.weights = _largest(self.weights, distance.item())


def _largest(before: float, now: float) -> float:
    """The larger of two, and NaN if one of them is: ``max`` would lose it."""
    return now if now != now or now > before else before
