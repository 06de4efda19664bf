"""``set_separate_reduce_scatter_group``: reductions in process groups of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    ShardingStrategy,
    fully_shard,
    recent_operations,
    set_separate_reduce_scatter_group,
)
from composable_fsdp.comm.operations import operation_log, operation_logs
from composable_fsdp.comm.watch import GroupWatch
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import TinyGPT
from tests.support.reference import adamw, gpt_input, train
from tests.support.world import RankPool, World, fake_world

pytestmark = pytest.mark.req("M-07")
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD]


def sharded(world: World, strategy: ShardingStrategy) -> Any:
    """Two blocks and a root, over a grid if replicas are asked for."""
    torch.manual_seed(0)
    model = TinyGPT()
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        grid = (2, world.world_size // 2)
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("outer", "inner"))
    for module in (*model.blocks, model):
        fully_shard(module, strategy=strategy, device_mesh=mesh)
    return model


def train_on_two_groups(world: World, strategy: ShardingStrategy) -> None:
    """Three steps with and without, and the groups of the collectives."""
    plain, model = sharded(world, strategy), sharded(world, strategy)
    expected = train(plain, world.rank, gpt_input, adamw)
    known = {each.name for each in operation_logs()}
    # Twice: the second call creates nothing.
    for _ in range(2):
        set_separate_reduce_scatter_group(model)
    before = seen_operations()

    losses = train(model, world.rank, gpt_input, adamw)

    assert losses == expected
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    groups: dict[str, set[str]] = {}
    for each in recent_operations():
        if (each.group, each.number) not in before:
            groups.setdefault(each.op, set()).add(each.group)
    (gathers,), (reductions,) = groups["all_gather"], groups["reduce_scatter"]
    assert gathers != reductions
    assert {each.name for each in operation_logs()} - known == {reductions}
    shard = _get_fsdp_handles(model)[0].groups.shard
    assert shard is not None
    (made,) = [
        each
        for each in dist.distributed_c10d._world.pg_map
        if each.group_name == reductions
    ]
    members = dist.get_process_group_ranks
    assert members(made) == members(shard)
    assert dist.get_backend(made) == dist.get_backend(shard)
    # A rank that leaves the order is found over either group.
    assert type(operation_log(made).watcher) is GroupWatch

    # A copy reduces over the same group; False goes back to that of the gathers.
    twin = copy.deepcopy(model)
    assert all(
        one.rule.group is other.rule.group is not None
        for one, other in zip(
            _get_fsdp_handles(twin), _get_fsdp_handles(model), strict=True
        )
    )
    set_separate_reduce_scatter_group(model, False)
    before = seen_operations()
    train(model, world.rank, gpt_input, adamw)
    assert {
        each.group
        for each in recent_operations()
        if each.op == "reduce_scatter" and (each.group, each.number) not in before
    } == {gathers}


def seen_operations() -> set[tuple[str, int]]:
    """The operations so far. A full ring has the same length after others."""
    return {(each.group, each.number) for each in recent_operations()}


@pytest.mark.parametrize(
    ("strategy", "size"), [(STRATEGIES[0], 2), (STRATEGIES[1], 4)], ids=str
)
def test_training_is_the_same_over_a_second_group(
    ranks: Callable[[int], RankPool], strategy: ShardingStrategy, size: int
) -> None:
    """Bit by bit; records name the group that a collective was sent over."""
    ranks(size).run(train_on_two_groups, strategy)


def test_one_unit_alone_and_refusals() -> None:
    """Without ``recurse`` the units below stay; a unit of one rank has no group."""
    with fake_world(4) as world:
        model = sharded(world, ShardingStrategy.FULL_SHARD)
        set_separate_reduce_scatter_group(model, recurse=False)
        root, *others = _get_fsdp_handles(model)
        assert root.rule.group is not None
        assert [each.rule.group for each in others] == [None, None]
        with pytest.raises(TypeError, match="expects True or False"):
            set_separate_reduce_scatter_group(model, 1)  # type: ignore[arg-type]
        copied = sharded(world, ShardingStrategy.NO_SHARD)
        set_separate_reduce_scatter_group(copied)
        assert {each.rule.group for each in _get_fsdp_handles(copied)} == {None}
