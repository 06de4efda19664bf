"""Laws of the recipes that the other property tests rely on."""

from __future__ import annotations

import torch
from hypothesis import given
from torch import nn

from tests.support.models import (
    build,
    legal_units,
    module_at,
    shardable_paths,
)
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.strategies import FEATURES, model_recipes


@given(recipe=model_recipes())
def test_gradients_reach_all_trainable_parameters_and_no_others(
    recipe: ModelRecipe,
) -> None:
    """One forward and backward gives each its finite gradient."""
    model = build(recipe)

    y = model(torch.ones(2, recipe.width))
    if y.requires_grad:
        y.sum().backward()

    assert y.shape == (2, recipe.width)
    for param in model.parameters():
        assert (param.grad is not None) is param.requires_grad
        assert param.grad is None or bool(param.grad.isfinite().all())


@given(recipe=model_recipes())
def test_equal_recipes_build_equal_models_without_the_shared_generator(
    recipe: ModelRecipe,
) -> None:
    """Values depend on the recipe alone, and the default generator is not used."""
    before = torch.get_rng_state()

    first, second = build(recipe), build(recipe)

    assert torch.equal(torch.get_rng_state(), before)
    assert first.state_dict().keys() == second.state_dict().keys()
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@given(recipe=model_recipes())
def test_a_recipe_prints_as_code_that_makes_it(recipe: ModelRecipe) -> None:
    """A failure can be pasted into an example."""
    made = eval(
        repr(recipe), {"ModelRecipe": ModelRecipe, "ModuleRecipe": ModuleRecipe}
    )

    assert made == recipe


@given(recipe=model_recipes())
def test_a_recipes_paths_are_places_of_its_model(recipe: ModelRecipe) -> None:
    """Paths are known without building, and the drawn units can be units."""
    model = build(recipe)
    places = [name for name, _ in model.named_modules(remove_duplicate=False)]

    assert set(recipe.paths()) <= set(places)
    assert set(recipe.shardable_paths()) <= set(shardable_paths(model))
    assert set(recipe.sharded) <= set(recipe.shardable_paths())


@given(recipe=model_recipes(features=FEATURES - {"shared"}))
def test_without_shared_modules_paths_are_those_of_the_model(
    recipe: ModelRecipe,
) -> None:
    """Names and order agree with ``named_modules``."""
    model = build(recipe)

    assert recipe.paths() == [name for name, _ in model.named_modules()]
    assert recipe.shardable_paths() == shardable_paths(model)


@given(recipe=model_recipes())
def test_legal_units_never_part_the_places_of_a_parameter(recipe: ModelRecipe) -> None:
    """Over all paths, the nearest unit above a parameter is one and the same."""
    model = build(recipe)
    units = {module_at(model, path) for path in legal_units(model, recipe.sharded)}
    owner: dict[nn.Parameter, nn.Module] = {}

    for path, module in model.named_modules(remove_duplicate=False):
        parts = path.split(".") if path else []
        above = [module_at(model, ".".join(parts[:n])) for n in range(len(parts) + 1)]
        nearest = next((m for m in reversed(above) if m in units), model)
        for param in module.parameters(recurse=False):
            assert owner.setdefault(param, nearest) is nearest


def test_every_odd_kind_can_stand_in_one_model() -> None:
    """What strategies may draw together builds and computes together."""
    inner = ModuleRecipe("linear", "my_fsdp_wrapped_module", dtype="bfloat16")
    children = (
        inner,
        ModuleRecipe("list", "module", (ModuleRecipe("scalar"), ModuleRecipe("zero"))),
        ModuleRecipe("dict", "module", (ModuleRecipe("tiny", frozen=1),)),
        ModuleRecipe("again", "block"),
        ModuleRecipe("mlp", "_fsdp_wrapped_module_x", dtype="float64", buffer=True),
    )
    model = build(ModelRecipe(ModuleRecipe("linear", children=children, tied=True)))

    assert model.block is model.my_fsdp_wrapped_module
    assert model.get_parameter("module.1.bias") is model.bias
    assert isinstance(model.module_2, nn.ModuleDict)
