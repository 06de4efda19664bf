"""Low-rank adapters on a frozen base: no special wrapping, and only they are reduced.

The base is bfloat16, the adapters are float32 and stand inside the same units::

    model.layers.0   bfloat16 frozen  norms, q, k, v, o, mlp   gathered
                     float32          adapters of q and v      gathered, reduced
    (root)           bfloat16 frozen  embedding, norm, head    gathered
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import plan
from tests.architectures.test_training import by_class, checkpoint, shard
from tests.architectures.zoo import (
    Built,
    batch,
    build,
    needs_transformers,
    own_loss,
)
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    adamw,
    assert_same_training,
    backward,
    train,
    train_reference,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
RANK = 2

pytestmark = needs_transformers


class Adapted(nn.Module):
    """A frozen linear layer with a trainable term of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in)`` to ``(..., out)`` in the dtype of ``x``."""
        y: Tensor = self.base(x) + self.up(self.down(x.float())).to(x.dtype)
        return y


def adapted_llama() -> Built:
    """Llama in bfloat16, frozen, with adapters on queries and values."""
    built = build("llama")
    built.model.to(torch.bfloat16).requires_grad_(False)
    for module in list(built.model.modules()):
        for name in ("q_proj", "v_proj"):
            if name in module._modules:
                setattr(module, name, Adapted(getattr(module, name)))
    return built


def bytes_of(tensors: Any) -> int:
    """Bytes of all ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train."""
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.req("U-01")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("use_reentrant", [None, False, True])
@on_ranks(2)
def test_adapters_train_as_on_the_plain_model(
    world: World, path: str, use_reentrant: bool | None
) -> None:
    """With the model's checkpointing, too, and the base stays as it was.

    Three steps of AdamW against the plain model, which does not checkpoint.
    """
    built = adapted_llama()
    plain = copy.deepcopy(built.model)
    if use_reentrant is not None:
        checkpoint(built.model, use_reentrant=use_reentrant)
    sharded = shard(built, path)
    inputs = partial(batch, "llama")

    expected = train_reference(plain, 2, inputs, adamw, loss_of=own_loss)
    losses = train(sharded, world.rank, inputs, adamw, loss_of=own_loss)

    mine = [step[world.rank] for step in expected]
    assert len(set(losses)) == 3
    assert_same_training(sharded, plain, losses, mine)


def reduce_adapters(world: World, path: str) -> tuple[int, int]:
    """Bytes that one step reduces, and bytes of gradients that it leaves here."""
    sharded = shard(adapted_llama(), path)
    with record_steps() as calls:
        backward(own_loss(sharded, batch("llama", 0, world.rank)))
    reduced = sum(call.nbytes for call in calls if call.op == "reduce_scatter")
    assert {call.op for call in calls} == {"all_gather", "reduce_scatter"}
    return reduced, bytes_of(p.grad for p in sharded.parameters() if p.grad is not None)


@pytest.mark.req("U-01")
@pytest.mark.parametrize("path", PATHS)
def test_a_step_reduces_the_adapters_bytes_and_no_others(
    ranks: RankCount, path: str
) -> None:
    """The plan's padding comes on top; gradients are the adapters' bytes over ranks."""
    built = adapted_llama()
    own = bytes_of(adapters(built.model))
    planned = plan(built.model, world_size=2, policy=by_class(built))
    trained = [r for u in planned.units for r in u.regions if r.trainable]
    padding = 4 * sum(r.padded_numel - r.numel for r in trained)

    results = ranks(2).run(reduce_adapters, path)

    assert own == 4 * sum(r.numel for r in trained)
    assert [reduced for reduced, _ in results] == [own + padding] * 2
    assert sum(gradients for _, gradients in results) == own
