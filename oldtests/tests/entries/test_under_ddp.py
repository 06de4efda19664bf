"""torch's DistributedDataParallel around modules of which units hold a part, or all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import FullyShardedDataParallel, fully_shard, replicate
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    adamw,
    differences,
    train,
    train_reference,
    wide_input,
)
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

x_of = wide_input(8)


class Mixed(nn.Module):
    """Shards of equal shapes beside what no unit holds: at the top, tied, a buffer."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(8))
        self.body = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        self.tail = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.tail.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The tail runs twice."""
        hidden = self.body(x * self.scale)
        return self.tied(torch.tanh(self.tail(hidden))).sum(1)  # type: ignore[no-any-return]


def shard_body(model: Mixed, path: str) -> nn.Module:
    """The body is one unit."""
    if path == "wrapper":
        model.body = FullyShardedDataParallel(model.body)  # type: ignore[assignment]
    else:
        fully_shard(model.body)
    return model


def shard_inside(model: Mixed, path: str) -> nn.Module:
    """One layer of the body, in the other's door, is its own unit."""
    other = fully_shard(model.body[1]) if path == "wrapper" else None
    model.body[1] = other or FullyShardedDataParallel(model.body[1])
    return model


@pytest.mark.few(1)
@pytest.mark.req("P-13")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_ddp_averages_what_no_unit_holds(world: World, path: str) -> None:
    """Shards of equal shapes stay what they were, and training is the plain model's."""
    plain = Mixed()
    expected = train_reference(plain, world.world_size, x_of, adamw)
    for put in (shard_body, shard_inside):
        for unused in (False, True):
            model = put(Mixed(), path)
            before = [p.detach().clone() for p in model.parameters()]
            around: Any = DistributedDataParallel(model, find_unused_parameters=unused)
            assert all(map(torch.equal, before, model.parameters()))

            losses = train(around, world.rank, x_of, adamw)

            assert losses == pytest.approx([step[world.rank] for step in expected])
            found = {
                name.replace("module.", "").replace("_fsdp_wrapped_module.", ""): value
                for name, value in around.state_dict().items()
            }
            worst = differences(found, plain.state_dict())
            assert max(worst.values(), default=0.0) < 1e-6


def check_whole(world: World) -> tuple[str, bool]:
    model = fully_shard(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))))
    before = [p.detach().clone() for p in model.parameters()]
    text = message_of(lambda: DistributedDataParallel(model))
    return text, all(map(torch.equal, before, model.parameters()))


@pytest.mark.req("P-13")
def test_ddp_around_a_model_that_is_all_sharded_is_refused(ranks: RankCount) -> None:
    """On every rank, before a weight is overwritten; the message says what to do."""
    text = (
        "CompositionError: DistributedDataParallel was put around a Sequential of which"
        " fully sharded modules hold every parameter that requires a gradient; expected"
        " one that is left for it. Over ranks [0, 1] they average their gradients "
        "themselves: leave DistributedDataParallel away and call the model itself."
    )
    assert ranks(2).run(check_whole) == [(text, True)] * 2


def groups_of_four(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The pair that shards, and the pair across."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


def check_other_ranks(world: World) -> list[str]:
    row, column = groups_of_four(world.rank)
    model = nn.Sequential(tiny_mlp(), nn.Linear(4, 4))
    fully_shard(model[0], process_group=row)
    texts = [
        message_of(partial(DistributedDataParallel, model, process_group=group))
        for group in (column, dist.group.WORLD)
    ]
    # Beside the unit it is nobody's business, and within its ranks DDP averages less.
    DistributedDataParallel(model[1], process_group=column)
    DistributedDataParallel(model, process_group=row)
    # Ours does both.
    replicate(model, process_group=column)
    return texts


@pytest.mark.req("P-13")
def test_ddp_over_ranks_that_nobody_would_average_is_refused(ranks: RankCount) -> None:
    """By parameter and unit, with both ways out; elsewhere DDP is as it was."""
    for rank, texts in enumerate(ranks(4).run(check_other_ranks)):
        for text, over in zip(texts, ([rank % 2, rank % 2 + 2], range(4)), strict=True):
            assert text.startswith(
                f"CompositionError: DistributedDataParallel over ranks {list(over)} was"
                " put around '0.0.weight', whose unit averages its gradients over "
                f"ranks {[0, 1] if rank < 2 else [2, 3]}; expected a unit that averages"
                " over all of them."
            )
            assert "device_mesh of (replicate, shard)" in text
            assert "replicate(model, process_group=...) of this package" in text
