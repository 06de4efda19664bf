"""``boxes`` and ``transfer_plan``: which rank holds what, and who sends what."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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

Held = dict[str, list[tuple[tuple[int, ...], Tensor]]]
"""By name, the boxes that a rank holds, and where they begin: from its state dict."""


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


def held(world: World, kind: str) -> tuple[Any, Any, Any]:
    """The boxes that a rank computes, without and with replicas, and what it holds."""
    model = build(world, kind)
    model.register_buffer("seen", torch.arange(3))
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    memory: Held = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedValue):
            shards = value.local_shards()
            memory[name] = [
                (s.metadata.shard_offsets, s.tensor.clone()) for s in shards
            ]
        else:
            memory[name] = [((0,) * value.ndim, value.detach().clone())]
    return boxes(model), boxes(model, replicas=True), memory


CASES = [
    *((size, "FULL") for size in (1, 3)),
    *product((2, 4), ("HYBRID", "TP")),
    (4, "NO_SHARD"),
]


def taken(memory: Held, name: str, box: Any) -> Tensor:
    """Read a box out of what a rank holds."""
    offsets, sizes = box
    for begins, value in memory[name]:
        inside = [o - b for o, b in zip(offsets, begins, strict=True)]
        ends = [i + s for i, s in zip(inside, sizes, strict=True)]
        if all(i >= 0 for i in inside) and all(
            e <= s for e, s in zip(ends, value.shape, strict=True)
        ):
            return value[tuple(slice(i, e) for i, e in zip(inside, ends, strict=True))]
    raise AssertionError(f"{name}: the rank does not hold {box}")


@pytest.mark.req("W-02")
def test_a_transfer_between_any_two_layouts_rebuilds_the_model(
    ranks: RankCount,
) -> None:
    """Bit by bit, each byte of the model sent once to each copy of it."""
    sides: dict[tuple[int, str], Any] = {}
    for size, kind in CASES:
        answers = ranks(size).run(held, kind)
        assert all(answer[:2] == answers[0][:2] for answer in answers)  # on all ranks
        sides[size, kind] = answers

    for a, b in product(sides, sides):
        if (a[1] == "TP") is not (b[1] == "TP"):
            continue  # of another width
        source, target = sides[a], sides[b]
        for copies in (0, 1):
            wanted = target[0][copies]
            plan = transfer_plan(source[0][0], wanted)
            made = {
                (rank, name, offsets, sizes): torch.full(sizes, float("nan"))
                for name, each in wanted.items()
                for rank, offsets, sizes in each
            }
            sent = 0
            for piece in plan:
                value = taken(source[piece.source][2], piece.name, piece.box)
                sent += value.numel()
                for (rank, name, offsets, sizes), into in made.items():
                    if (rank, name) != (piece.target, piece.name):
                        continue
                    at = [o - b for o, b in zip(piece.box[0], offsets, strict=True)]
                    if all(
                        i >= 0 and i + n <= s
                        for i, n, s in zip(at, piece.box[1], sizes, strict=True)
                    ):
                        where = zip(at, piece.box[1], strict=True)
                        into[tuple(slice(i, i + n) for i, n in where)] = value
            for (rank, name, offsets, sizes), value in made.items():
                expected = taken(target[rank][2], name, (offsets, sizes))
                assert torch.equal(value, expected.to(value.dtype)), (a, b, rank, name)
            if not copies:
                model = Recipe(hidden=32 if a[1] == "TP" else 11).plain()
                assert sent == sum(p.numel() for p in model.parameters()) + 3


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
