"""Every strategy over every form of ranks trains as the plain model does, and sends
what the plan says."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CustomPolicy,
    ShardingStrategy,
    fully_shard,
    plan,
)
from composable_fsdp.config import HYBRID
from composable_fsdp.errors import PlanError
from tests.runtime.traffic import Counts, counts, planned
from tests.support.models import TinyGPT, module_at
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    gpt_input,
    gpt_units,
    tolerance_at,
    train,
    trained_reference,
)
from tests.support.tiny import tiny_mlp
from tests.support.world import RankPool, World, fake_world

STEPS = 3


def ranks_of(form: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Arguments that name the ranks: ``shape`` is (replicas, ranks that share)."""
    size = shape[0] * shape[1]
    if form == "default":
        return {}
    if form == "group":
        return {"process_group": dist.new_group(list(range(size)))}
    if form == "line":
        return {"device_mesh": init_device_mesh("cpu", (size,))}
    if form == "bare mesh":
        return {"device_mesh": init_device_mesh("cpu", shape)}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if form == "mesh":
        return {"device_mesh": mesh}
    return {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}


def train_on(
    world: World,
    form: str,
    shape: tuple[int, int],
    strategy: ShardingStrategy,
    path: str,
) -> Counts:
    """Three steps against the reference, equal on all ranks; what they sent."""
    model = TinyGPT()
    options = ranks_of(form, shape)
    sharded = apply_units(
        model, gpt_units(model), path=path, strategy=strategy, **options
    )

    plain, expected = trained_reference(
        TinyGPT, world.world_size, gpt_input, adamw, steps=STEPS
    )
    with record_steps() as calls:
        losses = train(sharded, world.rank, gpt_input, adamw, steps=STEPS)

    mine = [step[world.rank] for step in expected]
    tolerance = tolerance_at(world.world_size)
    assert_same_training(sharded, plain, losses, mine, tolerance=tolerance)
    # Each rank's full values come from its own shard group: replicas are compared.
    assert world.all_equal(sharded.state_dict())
    return counts(calls)


@cache
def sent_in(
    strategy: ShardingStrategy, world_size: int, shard_world_size: int | None
) -> Counts:
    """What the plan says of three steps of a ``TinyGPT`` with a unit per block."""
    model = TinyGPT()
    chosen = [module_at(model, unit) for unit in gpt_units(model)]
    one = planned(
        plan(
            model,
            world_size=world_size,
            shard_world_size=shard_world_size,
            policy=CustomPolicy(lambda m: any(m is each for each in chosen)),
            strategy=strategy,
        )
    )
    return {op: (STEPS * n, STEPS * nbytes) for op, (n, nbytes) in one.items()}


FORMS = [
    *(("mesh", shape) for shape in [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2)]),
    ("pair", (2, 1)),
    ("pair", (2, 2)),
    ("group", (1, 2)),
    ("line", (1, 4)),
]


@pytest.mark.few(5)
@pytest.mark.req("D-07", "B-04", "B-19", "S2-10")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.name)
@pytest.mark.parametrize(("form", "shape"), FORMS, ids=str)
def test_every_strategy_on_every_form_of_ranks_equals_the_reference(
    ranks: Callable[[int], RankPool],
    form: str,
    shape: tuple[int, int],
    strategy: ShardingStrategy,
    path: str,
) -> None:
    """Meshes, FSDP1's pairs of (shard, replicate) and one group, also where a dim has
    one rank; replicas agree and the plan's bytes are sent, none by a rank alone."""
    if form in ("group", "line") and strategy in HYBRID:
        strategy = ShardingStrategy.NO_SHARD
    pool = ranks(shape[0] * shape[1])

    sent = pool.run(train_on, form, shape, strategy, path)

    share = shape[1] if strategy in HYBRID or shape[0] > 1 else None
    expected = sent_in(strategy, pool.world_size, share)
    assert sent == [expected] * pool.world_size
    assert bool(expected) == (pool.world_size > 1)


# ---- within a node -----------------------------------------------------------


def train_by_node(
    world: World, node: int, strategy: ShardingStrategy
) -> tuple[Counts, int]:
    """As ``train_on`` with nothing given, on nodes of ``node`` ranks; groups made."""
    make = distributed_c10d._new_process_group_helper
    with (
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(node)}),
        patch.object(distributed_c10d, make.__name__, wraps=make) as made,
    ):
        sent = train_on(world, "default", (1, 1), strategy, "composable")
    return sent, made.call_count


@pytest.mark.req("D-07")
@pytest.mark.parametrize(
    ("node", "world_size", "groups"), [(1, 1, 0), (1, 2, 0), (2, 4, 2), (4, 4, 0)]
)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_hybrid_without_ranks_shards_within_a_node(
    ranks: Callable[[int], RankPool],
    node: int,
    world_size: int,
    groups: int,
    strategy: ShardingStrategy,
) -> None:
    """``LOCAL_WORLD_SIZE`` ranks share; three units share the groups, made once."""
    # HFSDP has a group of all ranks, too, in the order of its pieces.
    groups += groups > 0 and strategy is ShardingStrategy.HFSDP

    answers = ranks(world_size).run(train_by_node, node, strategy)

    assert answers == [(sent_in(strategy, world_size, node), groups)] * world_size


# ---- several strategies in one tree ------------------------------------------


# ---- what is refused ----

NODES = "LOCAL_WORLD_SIZE"
REFUSED = [
    ("default", None, f"{NODES} .*; got nothing.*torchrun.*2-D device_mesh"),
    ("default", "two", "; got two"),
    ("default", "3", "world size 8; got 3.*2-D device_mesh"),
    ("group", None, "2-D device_mesh.*tuple.*or neither"),
    ("line", None, "2-D device_mesh.*tuple.*or neither"),
]


@pytest.mark.req("B-04")
@pytest.mark.parametrize(("form", "size", "match"), REFUSED)
def test_ranks_that_do_not_say_who_shares_are_refused(
    monkeypatch: pytest.MonkeyPatch, form: str, size: str | None, match: str
) -> None:
    """The way out is named, and no parameter has changed."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    model = tiny_mlp()
    shapes = [p.shape for p in model.parameters()]
    with fake_world(8):
        given = ranks_of(form, (1, 8))
        with pytest.raises(PlanError, match=match):
            fully_shard(model, strategy=ShardingStrategy.HYBRID_SHARD, **given)
    assert [p.shape for p in model.parameters()] == shapes
    assert fully_shard.state(model) is None
