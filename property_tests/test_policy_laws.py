"""Laws of policies and of applying them, on random trees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import wrap as fsdp1

from composable_fsdp.planning import walk
from composable_fsdp.planning.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    SizePolicy,
    Targets,
    evaluate_policy,
)
from composable_fsdp.planning.wrapping import post_order_apply
from composable_fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy
from tests.support.models import Node, build, module_at
from tests.support.recipes import ModelRecipe
from tests.support.strategies import FEATURES, model_recipes

Question = tuple[str, bool, int]


def trees() -> st.SearchStrategy[ModelRecipe]:
    """Recipes where no module has two parents, which FSDP1 would wrap twice."""
    return model_recipes(features=FEATURES - {"shared"})


def named(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def snapshot(model: nn.Module) -> list[object]:
    """What may not change: the objects at every place, their values and attributes."""
    places = model.named_modules(remove_duplicate=False)
    params = model.named_parameters(remove_duplicate=False)
    return [
        [(name, id(module), sorted(vars(module))) for name, module in places],
        [(name, id(p), p._version, p.requires_grad) for name, p in params],
    ]


class Recorded(nn.Module):
    """Stands for FSDP1's wrapper and remembers what it was given."""

    def __init__(self, module: nn.Module, log: list[nn.Module]) -> None:
        super().__init__()
        self.wrapped = module
        log.append(module)


def fsdp1_units(
    policy: Callable[..., bool], model: nn.Module, ignored: set[nn.Module]
) -> list[nn.Module]:
    """Let FSDP1 wrap ``model``, and return what it wrapped, in its order."""
    log: list[nn.Module] = []
    fsdp1._recursive_wrap(
        module=model,
        auto_wrap_policy=policy,
        wrapper_cls=Recorded,
        ignored_modules=ignored,
        ignored_params={p for module in ignored for p in module.parameters()},
        only_wrap_children=True,
        log=log,
    )
    return log


def some_of(model: nn.Module, recipe: ModelRecipe) -> frozenset[nn.Module]:
    """The drawn modules with all below them."""
    return walk.subtrees(module_at(model, path) for path in recipe.sharded)


@pytest.mark.req("S0-04")
@given(recipe=trees(), min_numel=st.integers(0, 80))
def test_size_policy_decides_as_fsdp1_without_wrapping(
    recipe: ModelRecipe, min_numel: int
) -> None:
    """The units are those of FSDP1's recursion, and the module is left as it was."""
    ours, theirs = build(recipe), build(recipe)
    names, before = named(theirs), snapshot(ours)
    ignored = set(some_of(theirs, recipe))
    legacy = partial(fsdp1.size_based_auto_wrap_policy, min_num_params=min_numel)

    units = evaluate_policy(
        SizePolicy(min_numel),
        ours,
        ignored_modules=some_of(ours, recipe),
        root_kwargs={},
    )
    expected = {names[module] for module in fsdp1_units(legacy, theirs, ignored)}

    assert {named(ours)[module] for module in units} == expected
    assert snapshot(ours) == before


@pytest.mark.req("S0-01", "S0-04")
@given(recipe=trees(), salt=st.integers(1, 50))
def test_a_callable_hears_the_questions_that_fsdp1_asks(
    recipe: ModelRecipe, salt: int
) -> None:
    """Same modules, same direction, same numel, same order, whatever it answers."""

    def asked_by(model: nn.Module, log: list[Question]) -> Callable[..., bool]:
        names = named(model)

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            log.append((names[module], recurse, nonwrapped_numel))
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                return recurse
            return (len(names[module]) * salt + nonwrapped_numel) % 3 != 0

        return policy

    ours, theirs = build(recipe), build(recipe)
    heard: list[Question] = []
    expected: list[Question] = []
    ignored = set(some_of(theirs, recipe))

    evaluate_policy(
        asked_by(ours, heard),
        ours,
        ignored_modules=some_of(ours, recipe),
        root_kwargs={},
    )
    fsdp1_units(asked_by(theirs, expected), theirs, ignored)

    assert heard == expected


def two_pass(
    root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """Count first, then choose what is larger than the mean."""
    nodes = [m for m in root.modules() if isinstance(m, Node)]
    numels = {m: sum(p.numel() for p in m.parameters()) for m in nodes}
    mean = sum(numels.values()) / len(numels)
    return {m: {"numel": numel} for m, numel in numels.items() if numel > mean}


def writes_to_what_it_gets(
    root: nn.Module, ignored: set[nn.Module], root_kwargs: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    ignored.clear()
    root_kwargs["precision"] = "changed"
    return {m: root_kwargs for m in root.modules() if isinstance(m, Node)}


class WritesAsAnObject:
    """The same hostility from a policy object."""

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> Targets:
        return writes_to_what_it_gets(root_module, ignored_modules, root_kwargs)


POLICIES: dict[str, object] = {
    "class": ModuleWrapPolicy({Node}),
    "custom": CustomPolicy(lambda m: isinstance(m, Node) and {"precision": "own"}),
    "size": SizePolicy(10),
    "size callable": partial(size_based_auto_wrap_policy, min_num_params=10),
    "always": always_wrap_policy,
    "two passes": two_pass,
    "writes": writes_to_what_it_gets,
    "writes as an object": WritesAsAnObject(),
    "torch's": fsdp1.ModuleWrapPolicy({Node}),
}


@pytest.mark.req("S0-01", "D-04")
@pytest.mark.parametrize("kind", POLICIES)
@given(recipe=model_recipes())
def test_evaluating_a_policy_changes_neither_tree_nor_arguments(
    kind: str, recipe: ModelRecipe
) -> None:
    """Parameters, modules, attributes, the options and the sets are as before."""
    model = build(recipe)
    before, root_kwargs, ignored = snapshot(model), {"precision": "root"}, set[Any]()
    ignored.update(some_of(model, recipe))
    kept = set(ignored)

    evaluate_policy(
        POLICIES[kind], model, ignored_modules=ignored, root_kwargs=root_kwargs
    )

    assert snapshot(model) == before
    assert root_kwargs == {"precision": "root"}
    assert ignored == kept


@pytest.mark.parametrize("kind", POLICIES)
@given(recipe=model_recipes(), as_boundary=st.booleans())
def test_units_come_in_modules_order_and_never_from_what_is_left_out(
    kind: str, recipe: ModelRecipe, as_boundary: bool
) -> None:
    """No root, no container, nothing in or below what is ignored or already a unit."""
    model = build(recipe)
    tops = frozenset(module_at(model, path) for path in recipe.sharded)
    empty: frozenset[nn.Module] = frozenset()

    units = evaluate_policy(
        POLICIES[kind],
        model,
        boundaries=tops if as_boundary else empty,
        ignored_modules=empty if as_boundary else tops,
        root_kwargs={},
    )

    assert list(units) == [m for m in model.modules() if m in units]
    assert units.keys().isdisjoint(some_of(model, recipe) | {model})
    assert all(isinstance(m, Node) for m in units)


@given(recipe=model_recipes())
def test_boundaries_take_nothing_from_what_is_beside_them(recipe: ModelRecipe) -> None:
    """By class, the units around boundaries and those of the boundaries are all."""
    model, policy = build(recipe), ModuleWrapPolicy({Node})
    everywhere = evaluate_policy(policy, model, root_kwargs={})

    around = evaluate_policy(
        policy,
        model,
        boundaries=frozenset(module_at(model, path) for path in recipe.sharded),
        root_kwargs={},
    )

    assert around.keys() == everywhere.keys() - some_of(model, recipe)


@pytest.mark.req("S0-02", "S1-18")
@given(recipe=trees())
def test_in_a_tree_targets_are_applied_in_reverse_modules_order(
    recipe: ModelRecipe,
) -> None:
    """The order is that of ``.modules()``, reversed."""
    model, seen = build(recipe), []
    targets: Targets = {module_at(model, path): {} for path in recipe.sharded}

    post_order_apply(model, targets, lambda module, _: seen.append(module))

    assert seen == [m for m in model.modules() if m in targets][::-1]


@pytest.mark.req("S0-01", "S0-02")
@given(recipe=model_recipes())
def test_targets_are_applied_once_each_and_after_all_targets_below(
    recipe: ModelRecipe,
) -> None:
    """Also with modules that have several parents; options arrive with their module."""
    model, seen = build(recipe), dict[nn.Module, Any]()
    targets = {module_at(model, path): {"path": path} for path in recipe.sharded}

    def fn(module: nn.Module, options: dict[str, Any]) -> None:
        assert module not in seen
        below = set(module.modules()) - {module}
        assert below & targets.keys() <= seen.keys()
        seen[module] = options

    post_order_apply(model, targets, fn)

    expected = {m: options for m, options in targets.items() if m is not model}
    assert seen == expected


@pytest.mark.req("S0-02")
@given(recipe=model_recipes())
def test_a_replacement_stands_wherever_its_module_stood(recipe: ModelRecipe) -> None:
    """Every place of a target holds its one replacement; other places are untouched."""
    model = build(recipe)
    targets: Targets = {module_at(model, path): {} for path in recipe.sharded}
    places = [edge for parent in model.modules() for edge in walk.edges(parent)]
    made = {module: nn.Sequential(module) for module in targets}

    post_order_apply(model, targets, lambda module, _: made[module])

    for parent, name, child in places:
        assert parent._modules[name] is made.get(child, child)


@given(recipe=model_recipes())
def test_walks_agree_with_torchs_own(recipe: ModelRecipe) -> None:
    """Order, names and sizes of subtrees are those of ``nn.Module``'s methods."""
    model = build(recipe)
    numels = walk.subtree_numels(model)

    assert list(walk.modules(model)) == list(model.modules())
    for name, module in model.named_modules():
        assert walk.name_of(model, module) == name
        assert numels[module] == sum(p.numel() for p in module.parameters())


@given(recipe=model_recipes())
def test_a_copy_gets_the_same_units_with_the_same_options(recipe: ModelRecipe) -> None:
    """Units depend on the tree alone, so every rank and path finds the same ones."""
    model, policy = build(recipe), POLICIES["custom"]
    twin = copy.deepcopy(model)

    ours = evaluate_policy(policy, model, root_kwargs={"precision": "root"})
    theirs = evaluate_policy(policy, twin, root_kwargs={"precision": "root"})

    assert [(named(model)[m], o) for m, o in ours.items()] == [
        (named(twin)[m], o) for m, o in theirs.items()
    ]
