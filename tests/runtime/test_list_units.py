"""What a forward leaves of a unit that is a list of modules, whatever ran of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    checkpoint_wrapper,
    fully_shard,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.phases import Residency
from composable_fsdp.storage.contents import contents_of
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import module_at
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import RankCount
from tests.support.world import World

X = torch.ones(1, 2)
IN_PARTS = ["", "a", "b", "aba"]
"""Which of the modules run, in order: not each of them once."""


class Chosen(nn.Module):
    """Runs its modules ``a`` and ``b`` as often as told, then a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a: nn.Module
        self.a, self.b, self.last = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in order:
            x = self._modules[name](x)  # type: ignore[misc]  # neither is None
        y: Tensor = self.last(x)
        return y


def shard(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> Chosen:
    """Make one unit of ``a`` and ``b``, and the root."""
    model = Chosen()
    fully_shard([model.a, model.b], strategy=strategy)
    return fully_shard(model, strategy=strategy)


@pytest.mark.req("B-02")
@pytest.mark.parametrize("order", [*IN_PARTS, "ab"])
@on_ranks(2)
def test_after_an_evaluation_the_whole_list_is_sharded(
    world: World, order: str
) -> None:
    """Also if one of its modules did not run, or one ran once more."""
    model = shard()
    parameters = list(model.parameters())

    with torch.no_grad():
        model(X, order)

    shown = model.parameters()
    assert all(p is before for p, before in zip(shown, parameters, strict=True))
    assert not any(
        s.handle.residency is not Residency.SHARDED for s in _get_fsdp_states(model)
    )


def step(world: World, order: str) -> int:
    """All-gathers of a step in which the loss needs ``order``."""
    model = shard(ShardingStrategy.SHARD_GRAD_OP)
    parameters = list(model.parameters())
    with record() as calls:
        loss = model(X, order).sum()
        shown = model.parameters()
        assert all(p is before for p, before in zip(shown, parameters, strict=True))
        backward(loss)
    assert not any(
        s.handle.residency is not Residency.SHARDED for s in _get_fsdp_states(model)
    )
    return sum(call.op == "all_gather" for call in calls)


@pytest.mark.req("B-02")
@pytest.mark.parametrize("order", [*IN_PARTS, "ab"])
def test_a_list_that_is_kept_for_backward_shows_its_shards_until_then(
    ranks: RankCount, order: str
) -> None:
    """Backward finds it full, and whoever asks for parameters the originals."""
    units = 2 if order else 1

    gathers = ranks(2).run(step, order)

    assert gathers == [units, units]


def recompute(world: World) -> bool:
    model = shard()
    # Around the unit's hooks, so they run again.
    model.a = checkpoint_wrapper(model.a)
    backward(model(X, "ab").sum())
    return any(s.remaining for s in _get_fsdp_states(model))


def test_recomputing_a_module_begins_no_round_of_its_list(ranks: RankCount) -> None:
    """Nothing waits for the modules that are not computed again."""
    assert ranks(2).run(recompute) == [False, False]


class Counted(nn.Module):
    """A layer with a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("third", torch.full((3,), 1 / 3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


@pytest.mark.req("B-02")
@on_ranks(2)
def test_buffers_of_one_name_keep_their_own_dtypes(world: World) -> None:
    """In state dicts, of each module alone too, and in checkpoints."""
    model = nn.Sequential(Counted(torch.float64), Counted(torch.float32))
    given = {name: buffer.dtype for name, buffer in model.named_buffers()}
    low = MixedPrecision(buffer_dtype=torch.bfloat16)
    fully_shard(list(model), mixed_precision=low)
    fully_shard(model)

    backward(model(X).sum())

    assert {b.dtype for b in model.buffers()} == {torch.bfloat16}
    whole = model.state_dict()
    assert {name: whole[name].dtype for name in given} == given
    for name, dtype in given.items():
        part = module_at(model, name[0])
        assert part.state_dict()["third"].dtype is dtype
    saved = contents_of(model, "save").tensors
    assert {n: t.dtype for t in saved for n in t.names if n in given} == given
