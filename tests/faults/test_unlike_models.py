"""One change to the model of one rank: every rank raises one error that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.comm import collectives
from tests.faults.fingerprints import Outcome, build, outcome, shard
from tests.support.sharded import RankCount
from tests.support.world import World

Change = Callable[[nn.Module], object]


def rename(model: nn.Module) -> None:
    """Give a parameter another name, at its place in the order."""
    layer = model.get_submodule("1.first")
    pairs = [
        (key.replace("weight", "renamed"), p) for key, p in layer._parameters.items()
    ]
    layer._parameters.clear()
    layer._parameters.update(pairs)


def reorder(model: nn.Module) -> None:
    table = model.get_submodule("1.first")._parameters
    table["weight"] = table.pop("weight")


def tie(model: nn.Module) -> None:
    model.get_submodule("1.first").weight = model.get_parameter("1.second.weight")


def other_shape(model: nn.Module) -> None:
    scale = model.get_parameter("1.scale")
    scale.data = scale.data.unsqueeze(-1)


def other_dtype(model: nn.Module) -> None:
    scale = model.get_parameter("1.scale")
    scale.data = scale.data.half()


CHANGES: dict[Change, str] = {
    rename: "'1.first.renamed'",
    reorder: "'1.first.weight'",
    tie: "'1.first.weight'",
    other_shape: "the shape of parameter '1.scale'",
    other_dtype: "the dtype of parameter '1.scale'",
    lambda m: m.get_parameter("1.scale").requires_grad_(False): "requires_grad of",
    lambda m: m[1].register_parameter("added", nn.Parameter(torch.ones(1))): "added",  # type: ignore[index]
    lambda m: fully_shard(m[1].first): "unit number",  # type: ignore[index]
}
"""What one rank does to the plain model, and what the error names."""


def check_changes(world: World) -> list[Outcome]:
    found = []
    for change in (None, *CHANGES):
        model = build()
        if change is not None and world.rank == world.world_size - 1:
            change(model)
        sharded = shard(model)
        with collectives.record() as calls:
            found.append(outcome(sharded.state_dict))
        assert [call.op for call in calls].count("all_gather_digests") == 1
    return found


@pytest.mark.req("X-09", "X-10", "X-11")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_change_on_one_rank_is_one_error_that_names_it(
    ranks: RankCount, world_size: int
) -> None:
    """Equal models raise nothing, after one exchange."""
    found, *others = ranks(world_size).run(check_changes)

    assert all(other == found for other in others)
    assert found[0] == Outcome(None, ())
    for (error, warned), told in zip(found[1:], CHANGES.values(), strict=True):
        assert told in str(error), told
        assert warned == ()
