"""Laws of the tree of states, on random models of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.tree.state import _get_module_fsdp_state
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
)
from tests.support.models import build, legal_units, module_at
from tests.support.recipes import ModelRecipe
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import World, single_rank_group

TREES = model_recipes(features=FEATURES - {"replicate"})


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[World]:
    with single_rank_group() as world:
        yield world


def shard(recipe: ModelRecipe) -> tuple[nn.Module, set[int]]:
    """Build and shard by hand, inner units first; return the ids of units, too."""
    model = build(recipe)
    chosen = [module_at(model, path) for path in legal_units(model, recipe.sharded)]
    # Whoever holds another holds more; a shared module may stand before its holder.
    for module in sorted(chosen, key=lambda module: len(list(module.modules()))):
        fully_shard(module)
    fully_shard(model)
    return model, {id(model), *map(id, chosen)}


@pytest.mark.req("S1-26", "S1-30")
@given(recipe=TREES)
def test_modules_lead_to_their_unit_and_names_to_their_leaf(
    recipe: ModelRecipe,
) -> None:
    """Read off dotted names: some path to a module has that unit as its nearest; names
    in a handle, first owners and further places start at the unit's module."""
    model, chosen = shard(recipe)
    nearest: dict[int, set[int]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parts = name.split(".") if name else []
        paths = [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
        above = map(model.get_submodule, paths)
        unit = next(m for m in above if id(m) in chosen)
        nearest.setdefault(id(module), set()).add(id(unit))

    for module in model.modules():
        state = _get_module_fsdp_state(module)
        assert state is not None
        assert id(state.module) in nearest[id(module)]
    for state in _get_fsdp_states(model):
        handle = state.handle
        layout = handle.layout
        slots = [s.index for r in layout.regions for s in r.layout.parameters]
        leaves = dict(zip(slots, handle.leaves, strict=True))
        assert {place.fqn for place in layout.places} >= set(handle._fqns)
        for place, owner in zip(layout.places, layout.owners, strict=True):
            leaf = leaves[place.slot_index]
            assert state.module.get_parameter(place.fqn) is leaf
            assert owner._parameters[place.name] is leaf
