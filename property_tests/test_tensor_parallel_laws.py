"""A sharded tensor-parallel model trains as the plain one, on any mesh.

Whatever the mesh, the plan of ``parallelize_module``, the strategy, the place of the
shards and the cut of the rows are: after a few steps with clipping, every parameter and
the norm are those of ``parallelize_module`` alone with gradients averaged by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composable_fsdp import (
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    get_full_param,
    optim_state_dict,
)
from property_tests.live import examples
from property_tests.program_side import Verbatim
from tests.parallel.models import (
    Recipe,
    average,
    batch,
    data_rank,
    loss_of,
    mesh_of,
    norm_of,
    pair,
    whole,
)
from tests.support.reference import backward
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]

RECIPES = st.builds(
    Recipe,
    sequence=st.booleans(),
    tied=st.booleans(),
    hidden=st.sampled_from([32, 9, 18]),
)
OPTIONS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(
            [
                ShardingStrategy.FULL_SHARD,
                ShardingStrategy.SHARD_GRAD_OP,
                ShardingStrategy.NO_SHARD,
            ]
        ),
        "block": st.sampled_from([*Block, Block.rows(3)]),
        "cpu_offload": st.sampled_from([None, CPUOffload(offload_params=True)]),
        # A wider dtype is exact, so that the law can hold for each element.
        "mixed_precision": st.sampled_from(
            [None, MixedPrecision(reduce_dtype=torch.float64)]
        ),
        # Encoded all-gathers that lose nothing.
        "wire": st.sampled_from([None, Verbatim()]),
    }
)


def check(world: World, recipe: Recipe, dp: int, options: dict[str, Any]) -> None:
    mesh = mesh_of(world, dp)
    model, plain = pair(recipe, mesh, **options)
    optims = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    for step in range(2):
        for each in (model, plain):
            backward(loss_of(each, batch(step, data_rank(mesh))))
        average(plain, mesh)
        expected = norm_of(plain)
        torch.testing.assert_close(clip_grad_norm_(model, 0.5), expected)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, 0.5 / (float(expected) + 1e-6)))
        for optim in optims:
            optim.step()
            optim.zero_grad()

    state = optim_state_dict(model, optims[0])["state"]
    for name, parameter in plain.named_parameters():
        close(get_full_param(model, name), whole(parameter.detach()))
        moments = optims[1].state[parameter]
        close(state[name]["exp_avg"], whole(moments["exp_avg"]))


def close(found: Tensor, expected: Tensor) -> None:
    # Sums over four ranks may be taken in another order, and Adam divides by small
    # numbers.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@examples(8)
@given(recipe=RECIPES, dp=st.sampled_from([1, 2, 4]), options=OPTIONS)
def test_a_tensor_parallel_model_trains_as_without_sharding(
    ranks: RankCount, recipe: Recipe, dp: int, options: dict[str, Any]
) -> None:
    """For any mesh, plan, strategy and place of the shards."""
    ranks(4).run(check, recipe, dp, options)
