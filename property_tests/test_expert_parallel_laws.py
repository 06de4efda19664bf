"""A model whose ranks hold other experts trains as the plain model on all data.

Whatever the mesh, the number of experts, the experts of a token, the form of the
experts, the units, the strategies and the place of the shards are: after a few steps
with clipping, the norm, every parameter and the optimizer state are those of the plain
model, which computes all tokens itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from composable_fsdp import (
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    optim_state_dict,
)
from property_tests.live import examples
from property_tests.program_side import Verbatim
from tests.parallel.experts import Recipe, batch, loss_of, shares
from tests.support.reference import backward
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def _is_possible(recipe: Recipe) -> bool:
    # A module for each expert means at least one on each rank.
    enough = all(shares(recipe.experts, recipe.ep)) or not recipe.listed
    return enough and recipe.top < recipe.experts


RECIPES = st.builds(
    Recipe,
    experts=st.integers(2, 9),
    top=st.integers(1, 3),
    shared=st.booleans(),
    listed=st.booleans(),
    ep=st.sampled_from([1, 2, 4]),
    starved=st.booleans(),
).filter(_is_possible)
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
        "mixed_precision": st.sampled_from(
            [None, MixedPrecision(reduce_dtype=torch.float64)]
        ),
        # Encoded all-gathers that lose nothing.
        "wire": st.sampled_from([None, Verbatim()]),
    }
)


def check(
    world: World,
    recipe: Recipe,
    units: str,
    options: dict[str, Any],
    experts: dict[str, Any],
) -> None:
    mesh, plain = recipe.mesh(world), recipe.plain()
    model = recipe.sharded(
        mesh["ep"],
        mesh["edp"],
        mesh._flatten("dp"),
        units=units,
        experts=experts,
        **options,
    )
    optims = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, plain)
    ]
    for step in range(2):
        backward(loss_of(model, batch(step, world.rank)))
        losses = [loss_of(plain, batch(step, rank)) for rank in range(world.world_size)]
        backward(torch.stack(losses).mean())
        norm = clip_grad_norm_(model, 0.5)
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        assert world.all_equal(norm)
        for optim in optims:
            optim.step()
            optim.zero_grad()

    weights = model.state_dict()
    state = optim_state_dict(model, optims[0])["state"]
    assert set(weights) == set(plain.state_dict())
    for name, parameter in plain.named_parameters():
        close(weights[name], parameter.detach())
        moments = optims[1].state[parameter]
        close(state[name]["exp_avg"], moments["exp_avg"])


def close(found: Tensor, expected: Tensor) -> None:
    # The plain model sums over all tokens of an expert at once.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@examples(8)
@given(
    recipe=RECIPES,
    units=st.sampled_from(["layers", "experts"]),
    options=OPTIONS,
    experts=OPTIONS,
)
def test_a_model_of_divided_experts_trains_as_the_plain_one(
    ranks: RankCount,
    recipe: Recipe,
    units: str,
    options: dict[str, Any],
    experts: dict[str, Any],
) -> None:
    """For any mesh, experts, units, strategies and places of the shards."""
    ranks(4).run(check, recipe, units, options, experts)
