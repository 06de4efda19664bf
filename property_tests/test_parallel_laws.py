"""Models whose ranks hold other experts, or other columns, train as without sharding.

The other side is the plain model, which computes all tokens itself; for tensor
parallelism ``parallelize_module`` alone, with gradients averaged by hand. Equal are the
norm, every parameter and the optimizer state after two steps with clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from composable_fsdp import (
    Block,
    CPUOffload,
    MixedPrecision,
    Placement,
    clip_grad_norm_,
    get_full_param,
    no_sync,
    optim_state_dict,
)
from property_tests.live import examples
from property_tests.program_side import Verbatim
from tests.parallel import experts, models
from tests.support.reference import backward
from tests.support.sharded import RankCount
from tests.support.world import World

Steps = Callable[[int], Tensor]


def _is_possible(recipe: experts.Recipe) -> bool:
    return recipe.top < recipe.experts


EXPERTS = st.builds(
    experts.Recipe,
    experts=st.integers(2, 9),
    layers=st.sampled_from([1, 2]),
    top=st.integers(1, 3),
    shared=st.booleans(),
    ep=st.sampled_from([1, 2, 4]),
    starved=st.booleans(),
).filter(_is_possible)
TENSORS = st.builds(
    models.Recipe,
    sequence=st.booleans(),
    tied=st.booleans(),
    hidden=st.sampled_from([32, 9, 18]),
    blocks=st.sampled_from([1, 2]),
)
# A wider dtype is exact, so that the law can hold for each element.
WIDER = MixedPrecision(reduce_dtype=torch.float64)
KINDS = ("states", "gradients", "parameters", "between")


def options_over(dim: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw options of units; ``dim`` of the mesh divides all, or some, or nothing."""
    divided = [Placement(**dict.fromkeys(KINDS[:n], (dim,))) for n in (4, 3, 2, 1, 0)]
    return st.fixed_dictionaries(
        {
            "placement": st.sampled_from(divided),
            "block": st.sampled_from([*Block, Block.rows(3)]),
            "cpu_offload": st.sampled_from([None, CPUOffload(offload_params=True)]),
            "mixed_precision": st.sampled_from([None, WIDER]),
            # Encoded all-gathers that lose nothing.
            "wire": st.sampled_from([None, Verbatim()]),
        }
    )


def two_steps(
    world: World, model: nn.Module, plain: nn.Module, lr: float, run: Steps
) -> list[torch.optim.Optimizer]:
    """Clip and step both; ``run`` does the backwards, and clips the plain one.

    The second step has the gradients of two batches.
    """
    optims: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(m.parameters(), lr=lr, eps=1e-3) for m in (model, plain)
    ]
    for step in range(2):
        expected = run(step)
        norm = clip_grad_norm_(model, 0.5)
        close(norm, expected)
        assert world.all_equal(norm)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return optims


def batches_of(model: nn.Module, step: int) -> Iterator[int]:
    """Number the batches of ``step``; gradients are reduced with the last one."""
    for at in range(step + 1):
        with nullcontext() if at == step else no_sync(model):
            yield 2 * step + at


def close(found: Tensor, expected: Tensor) -> None:
    # Sums have another order, and Adam divides by small numbers.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def check_experts(
    world: World,
    recipe: experts.Recipe,
    units: str,
    options: dict[str, Any],
    own: dict[str, Any],
) -> None:
    mesh, plain = recipe.mesh(world), recipe.plain()
    groups = mesh["ep"], mesh["edp"], mesh._flatten("dp")
    model = recipe.sharded(*groups, units=units, experts=own, **options)

    def run(step: int) -> Tensor:
        ranks = range(world.world_size)
        for at in batches_of(model, step):
            backward(experts.loss_of(model, experts.batch(at, world.rank)))
            losses = [experts.loss_of(plain, experts.batch(at, r)) for r in ranks]
            backward(torch.stack(losses).mean())
        return nn.utils.clip_grad_norm_(plain.parameters(), 0.5)

    optims = two_steps(world, model, plain, 1e-2, run)

    weights = model.state_dict()
    state = optim_state_dict(model, optims[0])["state"]
    assert set(weights) == set(plain.state_dict())
    for name, parameter in plain.named_parameters():
        close(weights[name], parameter.detach())
        moments = optims[1].state[parameter]
        close(state[name]["exp_avg"], moments["exp_avg"])


@pytest.mark.req("L-01", "L-03")
@examples(8)
@given(
    recipe=EXPERTS,
    units=st.sampled_from(["layers", "experts"]),
    options=options_over("dp"),
    own=options_over("edp"),
)
def test_a_model_of_divided_experts_trains_as_the_plain_one(
    ranks: RankCount,
    recipe: experts.Recipe,
    units: str,
    options: dict[str, Any],
    own: dict[str, Any],
) -> None:
    """For any mesh, experts, units, placements and places of the shards."""
    ranks(4).run(check_experts, recipe, units, options, own)


def check_tensors(
    world: World, recipe: models.Recipe, dp: int, options: dict[str, Any]
) -> None:
    mesh = models.mesh_of(world, dp)
    model, plain = models.pair(recipe, mesh, **options)

    def run(step: int) -> Tensor:
        for at in batches_of(model, step):
            for each in (model, plain):
                data = models.batch(at, models.data_rank(mesh))
                backward(models.loss_of(each, data))
        models.average(plain, mesh)
        norm = models.norm_of(plain)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        return norm

    optims = two_steps(world, model, plain, 1e-3, run)

    state = optim_state_dict(model, optims[0])["state"]
    for name, parameter in plain.named_parameters():
        close(get_full_param(model, name), models.whole(parameter.detach()))
        moments = optims[1].state[parameter]
        close(state[name]["exp_avg"], models.whole(moments["exp_avg"]))


@pytest.mark.req("L-01", "L-03")
@examples(8)
@given(recipe=TENSORS, dp=st.sampled_from([1, 2, 4]), options=options_over("dp"))
@example(  # ranks whose parts of other sizes lie in another order
    recipe=models.Recipe(sequence=False, tied=False, hidden=9, blocks=1),
    dp=1,
    options={"wire": Verbatim()},
)
def test_a_tensor_parallel_model_trains_as_without_sharding(
    ranks: RankCount, recipe: models.Recipe, dp: int, options: dict[str, Any]
) -> None:
    """For any mesh, plan, placement and place of the shards."""
    ranks(4).run(check_tensors, recipe, dp, options)
