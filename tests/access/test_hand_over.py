"""``boxes`` and ``transfer_plan``: which rank holds what, and who sends what."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    ShardingStrategy,
    StateDictType,
    fully_shard,
    set_state_dict_type,
)
from composable_fsdp.access import boxes, transfer_plan
from composable_fsdp.errors import CompositionError
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.parallel.models import Recipe, mesh_of, sharded
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

Held = dict[str, list[Any]]
"""By name, offsets and sizes of the boxes that a rank holds: from its state dict."""


def tensor_parallel(world: World, hidden: int = 32) -> nn.Module:
    mesh = mesh_of(world, world.world_size // 2)
    return sharded(Recipe(hidden=hidden).parallel(mesh), mesh)


def replicated(world: World, strategy: ShardingStrategy) -> nn.Module:
    sizes = (2, world.world_size // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = Recipe(hidden=11).plain()
    return sharded(model, mesh, strategy=strategy)


def plain_mesh(world: World, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (world.world_size, 1), mesh_dim_names=("dp", "tp"))
    return sharded(Recipe(hidden=11).plain(), mesh, **options)


def build(world: World, kind: str) -> nn.Module:
    if kind == "FULL":
        return plain_mesh(world)
    if kind == "NO_SHARD":
        return plain_mesh(world, strategy=ShardingStrategy.NO_SHARD)
    if kind == "HYBRID":
        return replicated(world, ShardingStrategy.HYBRID_SHARD)
    return tensor_parallel(world)


def held(world: World, kind: str) -> tuple[Any, Any, Held]:
    """The boxes that a rank computes, without and with replicas, and what it holds."""
    model = build(world, kind)
    model.register_buffer("seen", torch.arange(3))
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    found: Held = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedValue):
            found[name] = [tuple(shard.metadata)[:2] for shard in value.local_shards()]
        else:
            found[name] = [((0,) * value.ndim, tuple(value.shape))]
    return boxes(model), boxes(model, replicas=True), found


@pytest.mark.req("W-02")
@pytest.mark.parametrize(
    ("size", "kind"),
    [(1, "FULL"), (3, "FULL"), (4, "NO_SHARD"), *product((2, 4), ("HYBRID", "TP"))],
)
def test_each_rank_knows_what_all_hold(ranks: RankCount, size: int, kind: str) -> None:
    """As their state dicts have it; the laws of transfers between such boxes are in
    `property_tests/test_hand_over_laws.py`."""
    answers = ranks(size).run(held, kind)

    once, copies, _ = answers[0]
    assert all(answer[:2] == (once, copies) for answer in answers)
    for rank, (_, _, found) in enumerate(answers):
        for name, shards in found.items():
            mine = [box[1:] for box in copies[name] if box[0] == rank]
            assert sorted(mine) == sorted(shards), (rank, name)
            assert {box[1:] for box in once[name]} == {b[1:] for b in copies[name]}
            assert len({box[1:] for box in once[name]}) == len(once[name])


@pytest.mark.req("W-02")
def test_boxes_are_regular_or_refused_and_the_target_asks_for_what_there_is(
    one_rank: World,
) -> None:
    """Errors name the tensor and the way out; scalars and empty tensors have boxes."""
    model = nn.Linear(4, 3)
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.zeros(0, 2))
    found = boxes(fully_shard(model))

    assert found["scale"] == ((0, (), ()),)
    assert found["empty"] == ()
    assert transfer_plan(found, found)[0].box == ((0, 0), (3, 4))
    with pytest.raises(CompositionError, match=r"no tensor 'head'\. It has weight"):
        transfer_plan(found, {"head": ((0, (0,), (1,)),)})
    with pytest.raises(
        CompositionError, match=r"of 'bias' the source lacks 2 elements"
    ):
        transfer_plan({"bias": ((0, (0,), (1,)),)}, {"bias": found["bias"]})
    with pytest.raises(CompositionError, match=r"lacks 3 .* holds \(\(0, \(0, 0\)"):
        transfer_plan(found, {"weight": ((0, (0,), (3,)),)})
    twice = {"bias": (*found["bias"], (1, (0,), (3,)))}
    with pytest.raises(CompositionError, match=r"'bias' the source holds twice 3"):
        transfer_plan(twice, {"bias": found["bias"]})


@on_ranks(2)
def test_parts_of_other_sizes_are_refused_by_name(world: World) -> None:
    """On all ranks: the layouts of the others are not known here."""
    text = message_of(partial(boxes, tensor_parallel(world, 11)))

    assert "CompositionError: boxes: parts of " in text
    assert "differ in size over the ranks of tensor parallelism" in text
