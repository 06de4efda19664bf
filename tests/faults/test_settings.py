"""A setting that a rank alone changes between steps is told by name.

Without a comparison the ranks issue other collectives: gloo ends a process, or waits
until its time-out, or gradients are divided by other numbers on each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from composable_fsdp import FSDPError
from composable_fsdp.access import (
    set_gradient_divide_factor,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reduce_scatter_unused_params,
    set_requires_all_reduce,
    set_reshard_after_backward,
    set_reshard_after_forward,
    set_separate_reduce_scatter_group,
)
from composable_fsdp.features import (
    DefaultState,
    int8_all_to_all_hook,
    register_comm_hook,
)
from tests.faults.blocks import SOON, Blocks, sharded, steps_of
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount
from tests.support.short_waits import shorten_waits
from tests.support.world import World


def _hook(model: Blocks) -> None:
    everyone = dist.distributed_c10d._get_default_group()
    register_comm_hook(model, DefaultState(everyone), int8_all_to_all_hook)


def _ahead(model: Blocks) -> None:
    first, second, third = model.blocks
    set_modules_to_forward_prefetch(first, [third, second])


def _behind(model: Blocks) -> None:
    first, second, third = model.blocks
    set_modules_to_backward_prefetch(third, [first, second])


def _freeze(model: Blocks) -> None:
    model.get_parameter("blocks.1.weight").requires_grad_(False)


SETTINGS: dict[str, tuple[Callable[[Blocks], None], str]] = {
    "reshard after forward": (
        lambda model: set_reshard_after_forward(model, False),
        "reshard_after_forward=False of 'blocks.1'",
    ),
    "reshard after backward": (
        lambda model: set_reshard_after_backward(model, False),
        "reshard_after_backward=False of 'blocks.1'",
    ),
    "hook": (_hook, "communication hook=int8_all_to_all_hook of 'blocks.1'"),
    "forward prefetch": (_ahead, "units to prefetch in forward='blocks.2', 'blocks.1'"),
    "backward prefetch": (_behind, "units to prefetch in backward='blocks.0'"),
    "divide factor": (
        lambda model: set_gradient_divide_factor(model.blocks[1], 3.0),
        "gradient divide factor=3.0 of 'blocks.1'",
    ),
    "all-reduce": (
        lambda model: set_requires_all_reduce(model.blocks[1], False),
        "all-reduce of gradients over replicas=False of 'blocks.1'",
    ),
    "unused": (
        lambda model: set_reduce_scatter_unused_params(model, True),
        "reduction of unused parameters=True of 'blocks.1'",
    ),
    "separate group": (
        lambda model: set_separate_reduce_scatter_group(model),
        "separate group of reduce-scatters=True of 'blocks.1'",
    ),
    # gloo ends the process at the first reduce-scatter whose sizes differ.
    "freeze": (_freeze, "requires_grad=False of 'blocks.1.weight'"),
}


def change_alone(
    world: World, name: str, steps: int, strategy: str
) -> tuple[str, float]:
    """After ``steps`` steps the last rank changes a setting."""
    shorten_waits()
    model = sharded(strategy)
    # The first call makes groups, with all ranks; the next sends nothing.
    for separate in (True, False):
        set_separate_reduce_scatter_group(model, separate)
    steps_of(model, steps)
    if world.rank == world.world_size - 1:
        SETTINGS[name][0](model)
    start = time.monotonic()
    with pytest.raises(FSDPError) as caught:
        steps_of(model, 2)
    return str(caught.value), time.monotonic() - start


@pytest.mark.req("X-09")
@pytest.mark.parametrize(
    ("name", "steps", "strategy", "world_size"),
    [
        ("hook", 4, "FULL_SHARD", 2),
        ("divide factor", 1, "HYBRID_SHARD", 4),
        ("all-reduce", 4, "ZERO1", 2),  # over the ranks that divide the states
        ("freeze", 4, "FULL_SHARD", 2),
    ],
)
def test_a_setting_that_a_rank_alone_changes_is_told(
    ranks: RankCount, name: str, steps: int, strategy: str, world_size: int
) -> None:
    """Before rounds are known, and after; ranks know each in advance after 4 steps."""
    found = ranks(world_size).run(
        change_alone, name, steps, strategy, timeout=60, retire=True
    )

    for text, took in found:
        assert took < SOON
        # The other replica has seen no difference, and is told by this one.
        assert SETTINGS[name][1] in text
        assert "Set requires_grad of the same parameters on every rank" in text


@pytest.mark.req("X-09")
@on_ranks(2)
def test_settings_that_all_ranks_change_are_no_difference(world: World) -> None:
    """Training goes on, and after a few steps the new order is expected."""
    for name, (change, _) in SETTINGS.items():
        model = sharded()
        steps_of(model)
        change(model)
        if name == "reshard after backward":
            set_reshard_after_backward(model, True)
        steps_of(model, 4)


@pytest.mark.req("D-07")
@on_ranks(4)
def test_a_replica_may_evaluate_alone_at_any_time(world: World) -> None:
    """The order of its shard group then differs from that of the other replica."""
    model = sharded("HYBRID_SHARD")
    for evaluations in (0, 0, 0, 0, 1, 2, 1, 0, 3):
        steps_of(model)
        if world.rank < 2:
            for _ in range(evaluations):
                with torch.no_grad():
                    model(torch.ones(1, 4))
    steps_of(model)


@on_ranks(2)
def test_an_all_reduce_without_replicas_is_no_difference(world: World) -> None:
    """The setting has no effect there, so ranks may differ, before and after."""
    model = sharded()
    set_requires_all_reduce(model, world.rank == 0)
    steps_of(model)
    set_requires_all_reduce(model, world.rank == 1)
    steps_of(model)
