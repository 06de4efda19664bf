"""A native checkpoint of any mesh gives any other mesh the same model and optimizer.

Each element is in the files once, and comes back on any other placement, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composable_fsdp import Block, ShardingStrategy, fully_shard, load, save
from composable_fsdp.config import RowBlock
from composable_fsdp.storage.native import NativeSource
from property_tests.live import examples
from tests.parallel.models import mesh_of, whole
from tests.support.sharded import RankCount
from tests.support.world import World

NUMBER = count()


@dataclass(frozen=True)
class Placement:
    """How the ranks hold the tensors."""

    dp: int
    """Data ranks of four; 0: no tensor parallelism; -1: no sharding either."""
    cuts: tuple[int, ...]
    """The dim of each tensor that is cut; a dim that there is not: replicated."""
    loose: int
    """The tensors from this one on are in no unit."""
    block: Block | RowBlock
    replicas: int = 1
    """With tensor parallelism: replicas of the data ranks."""


@dataclass(frozen=True)
class Law:
    """Tensors, and two placements."""

    shapes: tuple[tuple[int, ...], ...]
    before: Placement
    after: Placement


class Tensors(nn.Module):
    """Tensors in a module that is sharded, and tensors beside."""

    def __init__(self, law: Law, at: Placement, world: World, *, seed: int) -> None:
        super().__init__()
        mesh, data, options = None, None, dict[str, Any]()
        if at.dp > 0:
            mesh = mesh_of(world, at.dp, replicas=at.replicas)
            data = mesh["dp"] if at.replicas == 1 else mesh["replicate", "shard"]
        if at.replicas > 1:
            options["strategy"] = ShardingStrategy.HYBRID_SHARD
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(law.shapes):
            value = torch.randn(shape, generator=generator)
            if mesh is not None:
                dim = at.cuts[i]
                place: Any = Shard(dim) if dim < len(shape) else Replicate()
                value = distribute_tensor(value, mesh["tp"], [place])
            self.register_parameter(f"p{i}", nn.Parameter(value))
        self.beside = list(self.parameters())[at.loose :]
        if at.dp >= 0:
            fully_shard(
                self,
                device_mesh=data,
                ignored_states=self.beside,
                block=at.block,
                **options,
            )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Moments after a step on the squares."""
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optim.step()
    return optim


def parts(model: Tensors, optim: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """This rank's values and moments by name."""
    return {
        name: [
            parameter.detach(),
            *(optim.state[parameter][key] for key in sorted(optim.state[parameter])),
        ]
        for name, parameter in model.named_parameters()
    }


def check(world: World, law: Law, folder: Path) -> None:
    first = Tensors(law, law.before, world, seed=1)
    optim = adam(first)
    save(folder / "a", first, optim)
    with NativeSource(folder / "a") as source:
        stored = [torch.Size(each.shape) for each in source.manifest.tensors]
        assert sorted(stored) == sorted(map(torch.Size, law.shapes))

    other = Tensors(law, law.after, world, seed=2)
    again = adam(other)
    load(folder / "a", other, again)
    save(folder / "b", other, again)
    back = Tensors(law, law.before, world, seed=3)
    second = adam(back)
    load(folder / "b", back, second)

    found, expected = parts(back, second), parts(first, optim)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for mine, value in zip(found[name], values, strict=True):
            assert type(mine) is type(value)
            if isinstance(value, DTensor):
                mine, value = whole(mine), whole(value)
            assert torch.equal(mine, value), name


def placements(tensors: int) -> st.SearchStrategy[Placement]:
    meshes = [(4, 1), (2, 1), (1, 1), (0, 1), (-1, 1), (1, 2), (2, 2)]
    return st.builds(
        lambda mesh, **rest: Placement(dp=mesh[0], replicas=mesh[1], **rest),
        mesh=st.sampled_from(meshes),
        cuts=st.tuples(*[st.integers(0, 3)] * tensors),
        loose=st.integers(0, tensors),
        block=st.sampled_from([*Block, Block.rows(3)]),
    )


@st.composite
def laws(draw: st.DrawFn) -> Law:
    shape = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    shapes = tuple(draw(st.lists(shape, min_size=1, max_size=4)))
    both = placements(len(shapes))
    return Law(shapes, draw(both), draw(both))


@pytest.mark.req("L-01", "M-05")
@examples(12)
@given(law=laws())
@example(
    # Four ranks have told of a parameter of which none has an element.
    law=Law(
        ((0,), (0, 3)),
        Placement(1, (0, 1), 1, Block.ROW),
        Placement(2, (0, 1), 2, Block.ROW),
    )
)
@example(
    # A tensor in no unit of fewer rows than ranks.
    law=Law(((1,),), Placement(1, (0,), 0, Block.ROW), Placement(1, (0,), 0, Block.ROW))
)
@example(
    # Half of the ranks have no element of ``p2``, and ``p1`` on another data rank.
    law=Law(
        ((), (), (1,), ()),
        Placement(1, (0, 0, 0, 0), 0, Block.ROW),
        Placement(2, (0, 0, 0, 0), 3, Block.ROW),
    )
)
@example(
    # Whole parameters on a rank, and blocks of rows.
    law=Law(
        ((7, 3), (5,), ()),
        Placement(0, (0, 0, 0), 3, Block.TENSOR),
        Placement(0, (0, 0, 0), 3, Block.rows(3)),
    )
)
@example(
    # Replicas of columns.
    law=Law(
        ((3, 9), (5,)),
        Placement(1, (1, 0), 2, Block.ROW, replicas=2),
        Placement(4, (1, 0), 2, Block.ROW),
    )
)
@example(
    # More ranks than elements, in a unit.
    law=Law(
        ((1, 1), (2,)),
        Placement(0, (0, 0), 2, Block.ROW),
        Placement(0, (0, 0), 2, Block.ELEMENT),
    )
)
def test_a_checkpoint_goes_from_any_placement_to_any_and_back(
    ranks: RankCount, tmp_path: Path, law: Law
) -> None:
    """Each element once in the files; the same values on each rank afterwards."""
    ranks(4).run(check, law, tmp_path / str(next(NUMBER)))
