"""Agreement: training on flat parameters is training on the originals.

Bit by bit at any number of ranks, because both reduce the same buffers. Weight decay is
left out: a parameter that nothing uses would decay in a flat one alone. So are bfloat16
parameters: torch's CPU kernels round the last few elements of a tensor otherwise than
those they take eight at a time (torch 2.13), and a flat tensor has other last ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import CPUOffload, MixedPrecision, optim_state_dict
from composable_fsdp.features import flat_parameters
from composable_fsdp.optim import get_full_optim_state
from property_tests.live import batches, examples
from tests.support.models import build, legal_units
from tests.support.place import _same
from tests.support.recipes import ODD, ModelRecipe, ModuleRecipe
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    clip_any,
    differences,
    sgd,
    train,
    wide_input,
)
from tests.support.sharded import RankCount
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import World

PRECISIONS = (
    None,
    MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecision(reduce_dtype=torch.bfloat16),
)
OPTIONS = st.fixed_dictionaries(
    {
        "path": st.sampled_from(PATHS),
        "strategy": st.sampled_from(STRATEGIES),
        "mixed_precision": st.sampled_from(PRECISIONS),
        "cpu_offload": st.sampled_from([None, CPUOffload(offload_params=True)]),
    }
)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    group = [{"params": list(parameters)}]
    return torch.optim.AdamW(group, lr=0.05, eps=1e-3, weight_decay=0.0)


def check_flat(
    world: World, recipes: list[ModelRecipe], options: dict[str, Any], clip: bool
) -> None:
    for recipe in recipes:
        for optimize in (sgd, adamw):
            check_one(world, recipe, options, optimize, clip=clip)


def check_one(
    world: World,
    recipe: ModelRecipe,
    options: dict[str, Any],
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    clip: bool,
) -> None:
    plain = build(recipe)
    units = legal_units(plain, recipe.sharded)
    models = [apply_units(copy.deepcopy(plain), units, **options) for _ in range(2)]
    made = [
        optimize(flat_parameters(models[0])),
        optimize(models[1].parameters()),
    ]
    losses = [
        train(
            model,
            world.rank,
            wide_input(recipe.width),
            lambda _, o=optimizer: o,  # type: ignore[misc]  # a default of its own
            clip=partial(clip_any, max_norm=0.3) if clip else None,
        )
        for model, optimizer in zip(models, made, strict=True)
    ]
    states = [
        optim_state_dict(model, optimizer)["state"]
        for model, optimizer in zip(models, made, strict=True)
    ]

    assert losses[0] == losses[1]
    assert differences(models[0].state_dict(), models[1].state_dict()) == {}
    assert states[0].keys() >= states[1].keys()
    for name, values in states[1].items():
        assert _same(states[0][name], values), name
    for name in list(states[1])[:1]:
        whole = get_full_optim_state(models[0], made[0], name)
        assert whole.keys() == states[1][name].keys()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@given(
    recipes=batches(model_recipes(2, 2, FEATURES - {"replicate", "dtypes"})),
    options=OPTIONS,
    clip=st.booleans(),
)
@example(
    recipes=[ModelRecipe(ModuleRecipe("scalar", children=(ModuleRecipe("zero"),)))],
    options={"path": "composable"},
    clip=True,
)
@example(
    recipes=[ODD],
    options={
        "path": "wrapper",
        "strategy": STRATEGIES[2],
        "mixed_precision": PRECISIONS[1],
    },
    clip=False,
)
@example(
    recipes=[ODD],
    options={
        "path": "composable",
        "mixed_precision": PRECISIONS[2],
        "cpu_offload": CPUOffload(offload_params=True),
    },
    clip=True,
)
@example(
    recipes=[ODD], options={"path": "wrapper", "strategy": STRATEGIES[1]}, clip=True
)
@examples(5)
def test_flat_parameters_train_as_the_originals_whatever_the_model(
    ranks: RankCount,
    world_size: int,
    recipes: list[ModelRecipe],
    options: dict[str, Any],
    clip: bool,
) -> None:
    """Losses, weights and optimizer state, for strategies, precisions and offload."""
    ranks(world_size).run(check_flat, recipes, options, clip)
