"""Laws of the recipes that the other property tests rely on."""

from __future__ import annotations

import torch
from hypothesis import example, given
from torch import nn

from tests.support.models import build, legal_units, module_at, shardable_paths
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.strategies import model_recipes

EVERY_KIND = ModelRecipe(
    ModuleRecipe(
        "linear",
        children=(
            ModuleRecipe("linear", "my_fsdp_wrapped_module", dtype="bfloat16"),
            ModuleRecipe(
                "list", "module", (ModuleRecipe("scalar"), ModuleRecipe("zero"))
            ),
            ModuleRecipe("dict", "module", (ModuleRecipe("tiny", frozen=1),)),
            ModuleRecipe("again", "block"),
            ModuleRecipe("mlp", "_fsdp_wrapped_module_x", dtype="float64", buffer=True),
        ),
        tied=True,
    )
)


@given(recipe=model_recipes())
@example(recipe=EVERY_KIND)
def test_a_recipe_builds_one_model_that_trains(recipe: ModelRecipe) -> None:
    """Equal values without the shared generator, finite gradients for all that is
    trained and no others; and it prints as code that makes it."""
    before = torch.get_rng_state()
    model, other = build(recipe), build(recipe)
    names = {"ModelRecipe": ModelRecipe, "ModuleRecipe": ModuleRecipe}

    assert torch.equal(torch.get_rng_state(), before)
    assert eval(repr(recipe), names) == recipe
    assert model.state_dict().keys() == other.state_dict().keys()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    y = model(torch.ones(2, recipe.width))
    if y.requires_grad:
        y.sum().backward()
    assert y.shape == (2, recipe.width)
    for param in model.parameters():
        assert (param.grad is not None) is param.requires_grad
        assert param.grad is None or bool(param.grad.isfinite().all())


@given(recipe=model_recipes())
@example(recipe=EVERY_KIND)
def test_paths_are_known_without_building(recipe: ModelRecipe) -> None:
    """Drawn units can be units, and legal ones never part the places of a parameter:
    over all paths, the nearest unit above it is one and the same."""
    model = build(recipe)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    units = {module_at(model, path) for path in legal_units(model, recipe.sharded)}
    owner: dict[nn.Parameter, nn.Module] = {}

    assert set(recipe.paths()) <= set(names)
    assert set(recipe.shardable_paths()) <= set(shardable_paths(model))
    assert set(recipe.sharded) <= set(recipe.shardable_paths())
    if all(node.kind != "again" for _, node in recipe.places()):
        assert recipe.paths() == [name for name, _ in model.named_modules()]
        assert recipe.shardable_paths() == shardable_paths(model)
    for path, module in model.named_modules(remove_duplicate=False):
        parts = path.split(".") if path else []
        above = [module_at(model, ".".join(parts[:n])) for n in range(len(parts) + 1)]
        nearest = next((m for m in reversed(above) if m in units), model)
        for param in module.parameters(recurse=False):
            assert owner.setdefault(param, nearest) is nearest
