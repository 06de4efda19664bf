"""The order of handles of a model, by its own tree and by that of a plain twin.

What is expected is read off an unsharded twin, never off our own traversal. Nothing
here needs Hypothesis, so that the same checks run on a bare GPU machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from composable_fsdp import FullyShardedDataParallel
from composable_fsdp.compose.registry import set_state
from composable_fsdp.naming import join_name, strip_wrapper
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _get_module_fsdp_state, root_of
from composable_fsdp.tree.traversal import (
    _get_fsdp_handles,
    _get_fsdp_states,
    _get_fsdp_states_with_modules,
)
from tests.support.models import build, legal_units, module_at
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.reference import PATHS, STYLES, apply_units
from tests.support.world import World

Order = list[tuple[str, tuple[str, ...]]]
"""Per handle: the name of its unit, and the names of its parameters, from the root."""

CPU = torch.device("cpu")

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
    """Take the modules at ``marked`` out of ``model``, a twin made for this."""
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
    """The units that may be units: none parts a parameter, none is marked."""
    marked = set(recipe.replicated_paths())
    return tuple(
        u for u in legal_units(build(recipe), recipe.sharded) if u not in marked
    )


def mark_replicated(model: nn.Module, recipe: ModelRecipe) -> None:
    for path in recipe.replicated_paths():
        set_state(module_at(model, path), "replicate", object())


def apply_marked(
    recipe: ModelRecipe,
    units: tuple[str, ...],
    path: str,
    style: str,
    device: torch.device,
) -> nn.Module:
    """Build, mark what is ``replicate``, and shard."""
    model = build(recipe).to(device)
    mark_replicated(model, recipe)
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
    assert root is states[0]
    assert len(set(handles)) == len(set(states)) == len(states)
    # Nobody but the root has lists.
    assert not any(hasattr(state, "_all_handles") for state in states[1:])
    return [
        (h.full_fqn, tuple(join_name(h.full_fqn, fqn) for fqn in h._fqns))
        for h in handles
    ]


def wrapper_order(model: nn.Module) -> list[str]:
    """Names of ``fsdp_modules``, from the wrapper's own tree."""
    names = {id(m): strip_wrapper(name) for name, m in model.named_modules()}
    found = FullyShardedDataParallel.fsdp_modules(model)
    states = _get_fsdp_states(model)

    assert [_get_module_fsdp_state(each.module) for each in found] == states
    return [names[id(each.module)] for each in found]


def module_order(model: nn.Module) -> list[str]:
    names = {id(m): strip_wrapper(name) for name, m in model.named_modules()}
    return [names[id(m)] for m in _get_fsdp_states_with_modules(model)[1]]


def all_orders(
    recipe: ModelRecipe, device: torch.device
) -> Iterator[tuple[str, nn.Module, Order]]:
    """Yield (path and style, model, order) for every way of applying."""
    units = sharded_units(recipe)
    for path in PATHS:
        for style in STYLES:
            model = apply_marked(recipe, units, path, style, device)
            yield f"{path}, {style}", model, order_of(model)


def check_orders(recipe: ModelRecipe, device: torch.device = CPU) -> Order:
    """All paths and styles have the expected order; returns it."""
    expected = expected_order(recipe, sharded_units(recipe))
    first: Order = []
    settings: list[UnitOptions] = []
    for how, model, order in all_orders(recipe, device):
        options = [h.layout.plan.options for h in _get_fsdp_handles(model)]
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
        order = check_orders(recipe, world.device)
        assert world.all_equal(order)
        for path in PATHS:
            model = apply_marked(
                recipe, sharded_units(recipe), path, "hybrid", world.device
            )
            y = model(torch.ones(2, recipe.width, device=world.device))
            if y.requires_grad:
                y.sum().backward()
            assert order_of(model) == order, path
