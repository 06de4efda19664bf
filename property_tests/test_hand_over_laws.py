"""Laws of handing shards to another layout, whatever the shapes and the two worlds."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable_fsdp import ShardingStrategy, fully_shard
from composable_fsdp.access import boxes, transfer_plan
from tests.support.strategies import shapes
from tests.support.world import fake_world

WAYS = [(size, "FULL_SHARD") for size in (1, 2, 3, 4)]
WAYS += [(4, "HYBRID_SHARD"), (3, "NO_SHARD"), (2, "TP"), (4, "TP")]


def boxes_of(sides: list[tuple[int, ...]], way: tuple[int, str], rank: int) -> Any:
    """The boxes that a rank computes of parameters of these shapes."""
    size, kind = way
    cut = 2 if kind in ("HYBRID_SHARD", "TP") else 1
    names = ("replicate", "shard") if kind == "HYBRID_SHARD" else ("dp", "tp")
    with fake_world(size, rank % size):
        mesh = init_device_mesh("cpu", (size // cut, cut), mesh_dim_names=names)
        model = nn.Sequential()
        for i, value in enumerate(map(torch.zeros, sides)):
            # Uneven parts are refused.
            if kind == "TP" and value.ndim and len(value) % 2 == 0:
                value = distribute_tensor(value, mesh["tp"], [Shard(0)])
            model.register_parameter(f"p{i}", nn.Parameter(value))
        over = mesh if kind == "HYBRID_SHARD" else mesh["dp"]
        strategy = ShardingStrategy["FULL_SHARD" if kind == "TP" else kind]
        return boxes(fully_shard(model, device_mesh=over, strategy=strategy))


def painted(side: tuple[int, ...], pieces: Any) -> Tensor:
    """The number that covers each element; each is covered once."""
    owner = torch.full(side, -1)
    for number, offsets, sizes in pieces:
        place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        assert (owner[place] == -1).all()
        owner[place] = number
    assert (owner >= 0).all()
    return owner


@given(
    sides=st.lists(shapes(max_dims=3), min_size=1, max_size=4),
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    rank=st.integers(0, 3),
)
@example(sides=[(6, 3), (7,), ()], ways=((4, "TP"), (3, "FULL_SHARD")), rank=2)
def test_a_transfer_sends_each_element_once_to_where_it_is_not(
    sides: list[tuple[int, ...]], ways: Any, rank: int
) -> None:
    """From the rank that holds it; what lies at its target already is not sent."""
    source, target = (boxes_of(sides, way, rank) for way in ways)

    plan = transfer_plan(source, target)

    moved = sum(prod(each.box[1]) for each in plan if each.source != each.target)
    for i, side in enumerate(sides):
        held, wanted = painted(side, source[f"p{i}"]), painted(side, target[f"p{i}"])
        mine = [each for each in plan if each.name == f"p{i}"]
        assert torch.equal(painted(side, [(m.source, *m.box) for m in mine]), held)
        assert torch.equal(painted(side, [(m.target, *m.box) for m in mine]), wanted)
        moved -= int((held != wanted).sum())
    assert moved == 0
