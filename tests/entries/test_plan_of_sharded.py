"""The plan of units made by hand is the plan of the sharding that the script makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
    plan,
)
from composable_fsdp.access import set_reshard_after_forward
from composable_fsdp.comm.collectives import record
from composable_fsdp.config import HYBRID
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.tools.sharding_plan import ShardingPlan
from tests.runtime.traffic import counts, planned
from tests.support.tiny import TinyBlock
from tests.support.world import fake_world

LOW = MixedPrecision(param_dtype=torch.bfloat16)


def model() -> nn.Sequential:
    """An embedding, four blocks and a head."""
    blocks = [TinyBlock(32, 4) for _ in range(4)]
    return nn.Sequential(nn.Embedding(50, 32), nn.ModuleList(blocks), nn.Linear(32, 50))


def blocks(made: nn.Sequential) -> list[nn.Module]:
    """The blocks of ``model``."""
    return list(made[1].children())


def by_policy(world_size: int = 8) -> ShardingPlan:
    """A unit per block, by a policy."""
    return plan(model(), world_size=world_size, policy=ModuleWrapPolicy({TinyBlock}))


@pytest.mark.req("N-01")
@pytest.mark.parametrize(
    "choose",
    [
        blocks,
        lambda m: m[1],
        lambda m: ["1.*"],
        lambda m: ["1.3", "1.[0-2]"],
        lambda m: (b for b in [*m[1], m]),
    ],
)
def test_units_are_modules_or_names_or_patterns(
    choose: Callable[[nn.Sequential], list[nn.Module | str]],
) -> None:
    """However they are named, the plan is that of the policy; the root may be named."""
    made = model()

    assert plan(made, world_size=8, units=choose(made)) == by_policy()


@pytest.mark.req("N-01")
@pytest.mark.parametrize("world_size", [None, 8, 64])
def test_a_sharded_model_has_the_plan_of_its_units(world_size: int | None) -> None:
    """On the ranks that it is on, and on others; also from the wrapper."""
    with fake_world(8):
        made = model()
        for block in blocks(made):
            fully_shard(block)
        fully_shard(made)
        wrapped = FullyShardedDataParallel(
            model(), auto_wrap_policy=ModuleWrapPolicy({TinyBlock})
        )

        assert plan(made, world_size=world_size) == by_policy(world_size or 8)
        assert plan(wrapped, world_size=world_size) == by_policy(world_size or 8)


@pytest.mark.req("N-01")
def test_blocks_that_are_sharded_count_below_a_root_that_is_not() -> None:
    """With their own options; those of the call are the root's, as in the script."""
    with fake_world(8):
        made = model()
        for block in blocks(made):
            fully_shard(block, mixed_precision=LOW)

        half = plan(made)
        other = plan(made, world_size=4)
        fully_shard(made)

        assert half == plan(made)
        assert other == plan(made, world_size=4)
    assert [u.options.mixed_precision for u in half.units] == [None, *[LOW] * 4]
    assert [u.fqn for u in half.units] == ["", "1.0", "1.1", "1.2", "1.3"]


@pytest.mark.req("N-01")
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_what_stays_full_by_a_setting_counts_in_the_plan(
    strategy: ShardingStrategy, reshards: bool
) -> None:
    """What a step sends is what the plan says, and the strategy has its own name."""
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        made = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        options: dict[str, Any] = {
            "strategy": strategy,
            "device_mesh": mesh if strategy in HYBRID else mesh._flatten("all"),
        }
        for block in list(made)[1:]:
            fully_shard(block, **options)
        fully_shard(made, **options)
        for block in list(made)[1:]:
            set_reshard_after_forward(block, reshards)
        for _ in range(2):
            with record() as calls:
                made(torch.ones(2, 8)).sum().backward()
            torch.optim.SGD(made.parameters()).step()

        found = plan(made)
        assert counts(calls) == planned(found)
    name = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "_HYBRID_SHARD_ZERO2"}
    if not reshards and strategy.name in name:
        assert found.units[1].options.strategy.name == name[strategy.name]


def test_wrong_units_are_refused_with_the_way_out() -> None:
    """What came, and what is near it."""
    made = model()

    with pytest.raises(PlanError, match=r"'1\.9', which matches no module.*'1\.3'"):
        plan(made, world_size=2, units=["1.9"])
    with pytest.raises(PlanError, match=r"TinyBlock '1\.0' twice"):
        plan(made, world_size=2, units=["1.0", blocks(made)[0]])
    with pytest.raises(PlanError, match="is not below it"):
        plan(made, world_size=2, units=[nn.Linear(2, 2)])
    with pytest.raises(PlanError, match="policy or units, not both"):
        plan(made, world_size=2, units=[], policy=ModuleWrapPolicy({TinyBlock}))
    with pytest.raises(TypeError, match=r"expects a list .*'1\.\*'. Pass \[it\]"):
        plan(made, world_size=2, units="1.*")
    with pytest.raises(TypeError, match="expects modules, names, or lists"):
        plan(made, world_size=2, units=[3])  # type: ignore[list-item]  # the mistake
    with pytest.raises(CompositionError, match="got a ModuleList"):
        plan(made, world_size=2, units=["1"])


def test_wrong_questions_about_what_is_sharded_are_refused() -> None:
    """Options that its units have already; a world size that is missing."""
    with pytest.raises(PlanError, match="expects world_size, the number of ranks"):
        plan(model())
    with fake_world(2):
        made = fully_shard(model())
        with pytest.raises(PlanError, match="whose units have their options"):
            plan(made, world_size=2, strategy=ShardingStrategy.SHARD_GRAD_OP)
        with pytest.raises((PlanError, CompositionError)):
            plan(made, world_size=2, units=["1.*"])
