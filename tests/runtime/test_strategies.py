"""Every strategy over every form of ranks trains as the plain model does."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CustomPolicy,
    MixedPrecision,
    PlanError,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    plan,
)
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.traffic import Counts, counts, planned
from tests.support.models import TinyGPT, module_at
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    tolerance_at,
    train,
    train_reference,
    trained_reference,
)
from tests.support.tiny import tiny_mlp
from tests.support.world import RankPool, World, fake_world

RankCount = Callable[[int], RankPool]
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
MESHES = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2)]
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


@pytest.mark.req("D-07", "B-04")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *HYBRID], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_strategy_on_every_two_dimensional_mesh_equals_the_reference(
    ranks: RankCount, shape: tuple[int, int], strategy: ShardingStrategy, path: str
) -> None:
    """Also where a dim has one rank; replicas agree and the plan's bytes are sent."""
    pool = ranks(shape[0] * shape[1])

    sent = pool.run(train_on, "mesh", shape, strategy, path)

    assert sent == [sent_in(strategy, pool.world_size, shape[1])] * pool.world_size


@pytest.mark.req("D-07", "B-04")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("form", ["group", "line"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_group_and_a_mesh_of_one_dimension_equal_the_reference(
    ranks: RankCount, world_size: int, form: str, strategy: ShardingStrategy
) -> None:
    """All ranks share the parameters; without sharding, all are replicas."""
    pool = ranks(world_size)

    sent = pool.run(train_on, form, (1, world_size), strategy, "composable")

    assert sent == [sent_in(strategy, world_size, None)] * world_size


@pytest.mark.req("D-07", "B-04")
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_a_pair_of_groups_is_shard_then_replicate(
    ranks: RankCount, shape: tuple[int, int], strategy: ShardingStrategy
) -> None:
    """FSDP1's tuple means the same ranks as the mesh."""
    pool = ranks(shape[0] * shape[1])

    sent = pool.run(train_on, "pair", shape, strategy, "wrapper")

    assert sent == [sent_in(strategy, pool.world_size, shape[1])] * pool.world_size


# ---- bytes of mixed precision ------------------------------------------------


def send_low(
    world: World,
    shape: tuple[int, int],
    strategy: ShardingStrategy,
    low: MixedPrecision,
) -> list[Counts]:
    """What each of two steps sends with mixed precision."""
    model = TinyGPT()
    options = ranks_of("mesh", shape)
    sharded = apply_units(
        model, gpt_units(model), strategy=strategy, mixed_precision=low, **options
    )
    steps = []
    for step in range(2):
        with record_steps() as calls:
            backward(loss_of(sharded, gpt_input(step, world.rank)))
        steps.append(counts(calls))
    return steps


@pytest.mark.parametrize("strategy", [*STRATEGIES, *HYBRID], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "low",
    [
        MixedPrecision(torch.bfloat16, torch.float32),
        MixedPrecision(torch.bfloat16),
        MixedPrecision(reduce_dtype=torch.bfloat16),
        MixedPrecision(torch.bfloat16, keep_low_precision_grads=True),
    ],
    ids=["both", "param", "reduce", "kept"],
)
def test_mixed_precision_sends_the_bytes_of_its_dtypes(
    ranks: RankCount,
    shape: tuple[int, int],
    strategy: ShardingStrategy,
    low: MixedPrecision,
) -> None:
    """Gathers count in the compute dtype, reductions in the reduce dtype."""
    pool = ranks(shape[0] * shape[1])
    model = TinyGPT()
    blocks = CustomPolicy(lambda m: any(m is block for block in model.blocks))
    expected = plan(
        model,
        world_size=pool.world_size,
        shard_world_size=shape[1],
        policy=blocks,
        strategy=strategy,
        mixed_precision=low,
    )

    for steps in pool.run(send_low, shape, strategy, low):
        assert steps == [planned(expected)] * 2


class Raise(nn.Module):
    """Give float32, whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        """Cast."""
        return x.float()


def test_dtypes_that_are_reduced_as_one_are_one_call() -> None:
    """A bfloat16 and a float32 layer, both reduced in float32, share a call."""
    first = nn.Linear(4, 4, dtype=torch.bfloat16)
    model = nn.Sequential(first, Raise(), nn.Linear(4, 4))
    low = MixedPrecision(reduce_dtype=torch.float32)
    expected = planned(plan(model, world_size=2, mixed_precision=low))

    with fake_world(2), record_steps() as calls:
        fully_shard(model, mixed_precision=low)
        backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())

    assert counts(calls) == expected
    assert expected["reduce_scatter"][0] == 1


# ---- within a node -----------------------------------------------------------


def train_by_node(
    world: World, node: int, strategy: ShardingStrategy
) -> tuple[Counts, int]:
    """As ``train_on`` with nothing given, on nodes of ``node`` ranks; groups made."""
    with (
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(node)}),
        patch.object(dist, "new_group", wraps=dist.new_group) as made,
    ):
        sent = train_on(world, "default", (1, 1), strategy, "composable")
    return sent, made.call_count


@pytest.mark.req("D-07")
@pytest.mark.parametrize(
    ("node", "world_size", "groups"), [(1, 1, 0), (1, 2, 0), (2, 4, 4), (4, 4, 0)]
)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_hybrid_without_ranks_shards_within_a_node(
    ranks: RankCount,
    node: int,
    world_size: int,
    groups: int,
    strategy: ShardingStrategy,
) -> None:
    """``LOCAL_WORLD_SIZE`` ranks share; three units share the groups, made once."""
    answers = ranks(world_size).run(train_by_node, node, strategy)

    assert answers == [(sent_in(strategy, world_size, node), groups)] * world_size


def shard_by_node_twice(world: World, destroy: bool) -> tuple[int, int, list[int]]:
    """Shard two models by node; groups made for each, and the first model's ranks."""
    made = []
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        for _ in range(2):
            with patch.object(dist, "new_group", wraps=dist.new_group) as new:
                model = fully_shard(TinyGPT(), strategy=HYBRID[0])
            made.append(new.call_count)
            (handle,) = _get_fsdp_handles(model)
            groups = handle.groups.shard, handle.groups.replicate
            if destroy and len(made) == 1:
                for group in groups:
                    dist.destroy_process_group(group)
    assert groups[0] is not None
    return made[0], made[1], dist.get_process_group_ranks(groups[0])


@pytest.mark.parametrize("destroy", [False, True])
def test_groups_of_nodes_are_made_once_until_they_are_destroyed(
    ranks: RankCount, destroy: bool
) -> None:
    """A second model finds them; after ``destroy_process_group`` they are made anew."""
    answers = ranks(4).run(shard_by_node_twice, destroy)

    again = 4 if destroy else 0
    assert answers == [(4, again, [0, 1])] * 2 + [(4, again, [2, 3])] * 2


# ---- several strategies in one tree ------------------------------------------


def train_mixed(world: World, path: str, form: str) -> dict[str, tuple[int, int]]:
    """Clipped steps of units of four strategies below one root; their sizes."""
    model = TinyGPT(layers=4)
    plain = copy.deepcopy(model)
    given = {
        model.blocks[0]: ShardingStrategy.NO_SHARD,
        model.blocks[1]: ShardingStrategy.SHARD_GRAD_OP,
        model.blocks[2]: ShardingStrategy.HYBRID_SHARD,
        model.blocks[3]: ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    key = "sharding_strategy" if path == "wrapper" else "strategy"
    policy = CustomPolicy(lambda m: {key: given[m]} if m in given else False)
    options = {**ranks_of(form, (2, 2)), key: ShardingStrategy.FULL_SHARD}
    options["auto_wrap_policy" if path == "wrapper" else "policy"] = policy
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        sharded = apply_units(model, [], path=path, **options)

    expected = train_reference(
        plain,
        world.world_size,
        gpt_input,
        adamw,
        clip=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05),
    )
    losses = train(
        sharded, world.rank, gpt_input, adamw, clip=lambda m: clip_grad_norm_(m, 0.05)
    )

    mine = [step[world.rank] for step in expected]
    assert_same_training(sharded, plain, losses, mine, tolerance=1e-5)
    assert world.all_equal(sharded.state_dict())
    return {
        handle.layout.plan.fqn: (handle.groups.shard_world_size, handle.groups.replicas)
        for handle in _get_fsdp_handles(sharded)
    }


@pytest.mark.few(2)
@pytest.mark.req("D-07")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("form", "whole"),
    [("default", (4, 1)), ("mesh", (2, 2)), ("bare mesh", (2, 2)), ("pair", (2, 2))],
)
def test_units_of_one_tree_may_differ_in_strategy(
    ranks: RankCount, form: str, whole: tuple[int, int], path: str
) -> None:
    """Each unit has groups of its own, and the norm counts every gradient once."""
    sizes = {"": whole, "blocks.0": (1, 4), "blocks.1": whole}
    sizes |= {"blocks.2": (2, 2), "blocks.3": (2, 2)}

    assert ranks(4).run(train_mixed, path, form) == [sizes] * 4


# ---- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "match"),
    [
        (None, "LOCAL_WORLD_SIZE, which is not set.*torchrun.*2-D device_mesh"),
        ("two", "which is two"),
        ("0", "which is 0"),
        ("3", "LOCAL_WORLD_SIZE=3 does not divide the world size 8.*2-D device_mesh"),
    ],
)
def test_nodes_of_unknown_or_unequal_size_are_refused(
    monkeypatch: pytest.MonkeyPatch, size: str | None, match: str
) -> None:
    """The message names the variable and the way out; no parameter has changed."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    model = tiny_mlp()
    shapes = [p.shape for p in model.parameters()]

    with fake_world(8), pytest.raises(PlanError, match=match):
        fully_shard(model, strategy=ShardingStrategy.HYBRID_SHARD)

    assert [p.shape for p in model.parameters()] == shapes
    assert fully_shard.state(model) is None


@pytest.mark.req("B-04")
@pytest.mark.parametrize("form", ["group", "line"])
def test_hybrid_on_one_group_is_refused(form: str) -> None:
    """It does not say where to cut, and both ways out are named."""
    with fake_world(4):
        options = ranks_of(form, (1, 4))

        with pytest.raises(PlanError, match=r"2-D device_mesh.*tuple.*or neither"):
            fully_shard(tiny_mlp(), strategy=HYBRID[0], **options)


def test_no_shard_on_two_groups_of_a_part_of_the_world_is_refused() -> None:
    """No group holds all four of the eight ranks, so none can average."""
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

        with pytest.raises(PlanError, match=r"hold 4 ranks together.*1-D mesh"):
            fully_shard(
                tiny_mlp(),
                strategy=ShardingStrategy.NO_SHARD,
                device_mesh=mesh["b", "c"],
            )


def test_a_hybrid_plan_needs_the_number_of_ranks_that_share() -> None:
    """A plan reads no environment; a number that does not divide is refused."""
    with pytest.raises(PlanError, match="expects shard_world_size"):
        plan(tiny_mlp(), world_size=4, strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(PlanError, match="divides world_size=4, got 3"):
        plan(tiny_mlp(), world_size=4, shard_world_size=3)
