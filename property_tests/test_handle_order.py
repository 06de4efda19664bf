"""The headline: one order of handles, whatever the path, the style and the rank.

On every rank, the units and the parameters of each unit come in the order of ``.modules()``
of the plain model, for manual, auto and hybrid application, on both paths. What is expected
is read off an unsharded twin of the model, never off our own traversal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from torch import nn

from composable_fsdp import CustomPolicy, FullyShardedDataParallel, plan
from composable_fsdp.compose.registry import set_state
from composable_fsdp.naming import join, strip_wrapper
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.testing.models import build, legal_units, module_at
from composable_fsdp.testing.recipes import ModelRecipe, ModuleRecipe
from composable_fsdp.testing.strategies import FEATURES, model_recipes
from composable_fsdp.testing.world import RankPool, World, fake_world
from composable_fsdp.tree.root import ensure_root, root_of
from composable_fsdp.tree.state import _get_module_fsdp_state
from composable_fsdp.tree.traversal import (
    _get_fsdp_handles,
    _get_fsdp_states,
    _get_fsdp_states_with_modules,
)
from property_tests.live import batches, examples
from tests.runtime.reference import PATHS, STYLES, apply_units

RankCount = Callable[[int], RankPool]
Order = list[tuple[str, tuple[str, ...]]]
"""Per handle: the name of its unit, and the names of its parameters, from the root."""

WORLD_SIZES = (1, 2, 3, 4)

# A mark sits on a module, so on every place of it: marks and repeated modules are drawn
# apart, which keeps what is expected simple.
UNMARKED = FEATURES - {"replicate"}
MARKED = FEATURES - {"shared", "tied"}
TREES = model_recipes(3, 3, UNMARKED) | model_recipes(3, 3, MARKED)

SUB1_SUB2 = ModelRecipe(
    ModuleRecipe(
        "linear",
        children=(
            ModuleRecipe("linear", "sub1"),
            ModuleRecipe("plain", "sub2", (ModuleRecipe("linear", "lin"),)),
        ),
    ),
    sharded=("sub1", "sub2"),
)


@dataclass(frozen=True)
class Expected:
    """What the plain model says: unit names in order, and each unit's parameters."""

    units: list[str]
    parameters: dict[str, set[str]]


def reachable(model: nn.Module, marked: list[str]) -> nn.Module:
    """Take the modules at ``marked`` out of ``model``, which is a twin made for this."""
    for path in marked:
        parent, _, name = path.rpartition(".")
        try:
            module_at(model, parent)._modules[name] = None
        except AttributeError:
            continue  # below another marked module
    return model


def expected_order(recipe: ModelRecipe, units: tuple[str, ...]) -> Expected:
    """Read the answer off a plain twin: filter ``.modules()``, nearest unit above."""
    twin = build(recipe)
    chosen = {"", *units}
    at = {id(module_at(twin, path)) for path in chosen}
    reachable(twin, recipe.replicated_paths())
    # The first name of each module, in the order of .modules().
    names = {id(module): name for name, module in twin.named_modules()}
    order = [name for key, name in names.items() if key in at]
    parameters: dict[str, set[str]] = {name: set() for name in order}
    for name, _ in twin.named_parameters():
        parts = name.split(".")[:-1]
        above = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
        owner = next(p for p in above if id(twin.get_submodule(p)) in at)
        parameters[names[id(twin.get_submodule(owner))]].add(name)
    return Expected(order, parameters)


def sharded_units(recipe: ModelRecipe) -> tuple[str, ...]:
    """The units of ``recipe`` that may be units: none parts a parameter, none is marked."""
    marked = set(recipe.replicated_paths())
    return tuple(
        u for u in legal_units(build(recipe), recipe.sharded) if u not in marked
    )


def apply_marked(
    recipe: ModelRecipe, units: tuple[str, ...], path: str, style: str
) -> nn.Module:
    """Build, mark what is ``replicate``, and shard."""
    model = build(recipe)
    for marked in recipe.replicated_paths():
        set_state(module_at(model, marked), "replicate", object())
    return apply_units(model, units, path=path, style=style)


def order_of(model: nn.Module) -> Order:
    """The handles of ``model`` after lazy initialization, by their own names."""
    states = _get_fsdp_states(model)
    context = ensure_root(states[0])
    root = root_of(context)
    handles = _get_fsdp_handles(model)

    assert list(root._all_fsdp_states) == states
    assert list(root._all_handles) == handles == [state.handle for state in states]
    assert all(state.context is context for state in states)
    return [
        (h.full_fqn, tuple(join(h.full_fqn, fqn) for fqn in h._fqns)) for h in handles
    ]


def wrapper_order(model: nn.Module) -> list[str]:
    """Names of ``fsdp_modules``, from the wrapper's own tree."""
    names = {id(m): strip_wrapper(name) for name, m in model.named_modules()}
    found = FullyShardedDataParallel.fsdp_modules(model)
    states = _get_fsdp_states(model)

    assert [_get_module_fsdp_state(each.module) for each in found] == states
    return [names[id(each.module)] for each in found]


def module_order(model: nn.Module) -> list[str]:
    """Names, in the live tree, of the modules that carry the states."""
    names = {id(m): strip_wrapper(name) for name, m in model.named_modules()}
    return [names[id(m)] for m in _get_fsdp_states_with_modules(model)[1]]


def all_orders(recipe: ModelRecipe) -> Iterator[tuple[str, nn.Module, Order]]:
    """Yield (path and style, model, order) for every way of applying."""
    units = sharded_units(recipe)
    for path in PATHS:
        for style in STYLES:
            model = apply_marked(recipe, units, path, style)
            yield f"{path}, {style}", model, order_of(model)


def check_orders(recipe: ModelRecipe) -> Order:
    """All paths and styles have the expected order; returns it."""
    expected = expected_order(recipe, sharded_units(recipe))
    first: Order = []
    settings: list[UnitOptions] = []
    for how, model, order in all_orders(recipe):
        options = [h.plan.options for h in _get_fsdp_handles(model)]
        first, settings = first or order, settings or options
        assert options == settings, how
        assert order == first, how
        assert [name for name, _ in order] == expected.units, how
        assert {name: set(fqns) for name, fqns in order} == expected.parameters, how
        assert module_order(model) == expected.units, how
        if how.startswith("wrapper"):
            assert wrapper_order(model) == expected.units, how
    return first


def check_on_ranks(world: World, recipes: list[ModelRecipe]) -> None:
    """As ``check_orders``, equal on all ranks, and models that ran have it still."""
    for recipe in recipes:
        order = check_orders(recipe)
        assert world.all_equal(order)
        for path in PATHS:
            model = apply_marked(recipe, sharded_units(recipe), path, "hybrid")
            y = model(torch.ones(2, recipe.width))
            if y.requires_grad:
                y.sum().backward()
            assert order_of(model) == order, path


@pytest.mark.req("S1-17", "S1-18", "S1-22", "S1-23", "S1-26", "S1-28", "S0-09")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@examples(10)
@given(recipes=batches(model_recipes(2, 2, UNMARKED)))
@example(recipes=[SUB1_SUB2])
def test_handle_order_is_that_of_modules_on_live_ranks(
    ranks: RankCount, world_size: int, recipes: list[ModelRecipe]
) -> None:
    """Both paths, three styles, every rank: one order, that of the plain ``.modules()``."""
    ranks(world_size).run(check_on_ranks, recipes)


@pytest.mark.req("S1-16", "S1-19")
@pytest.mark.parametrize("world_size", [1, 3])
@examples(5)
@given(recipes=batches(model_recipes(2, 2, MARKED)))
def test_replicate_subtrees_are_left_out_on_live_ranks(
    ranks: RankCount, world_size: int, recipes: list[ModelRecipe]
) -> None:
    """A mark hides its whole subtree, also the ``fully_shard`` calls in it."""
    ranks(world_size).run(check_on_ranks, recipes)


@pytest.mark.req("S1-16", "S1-17", "S1-18", "S1-19", "S1-23", "S0-09")
@examples(200)
@given(recipe=TREES)
@example(recipe=SUB1_SUB2)
def test_handle_order_is_that_of_modules_in_every_fake_world(
    recipe: ModelRecipe,
) -> None:
    """The same law without ranks, on larger trees, with ``replicate`` marks."""
    orders = []
    for world_size in WORLD_SIZES:
        with fake_world(world_size, rank=world_size - 1):
            orders.append(check_orders(recipe))

    assert all([n for n, _ in o] == [n for n, _ in orders[0]] for o in orders)


@pytest.mark.req("S1-17", "S1-18")
@examples(200)
@given(recipe=TREES)
def test_a_plan_lists_units_in_the_order_of_modules(recipe: ModelRecipe) -> None:
    """Planning alone, at any number of ranks, has the order of the plain ``.modules()``."""
    units = sharded_units(recipe)
    expected = expected_order(recipe, units)
    model = build(recipe)
    for marked in recipe.replicated_paths():
        set_state(module_at(model, marked), "replicate", object())
    chosen = {id(module_at(model, path)) for path in units}
    policy = CustomPolicy(lambda module: id(module) in chosen)

    for world_size in (*WORLD_SIZES, 7, 64):
        planned = plan(model, world_size=world_size, policy=policy)
        assert [unit.fqn for unit in planned.units] == expected.units
