"""Laws of policies and of applying them, on random trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import wrap as fsdp1

from composable_fsdp.doors.wrapping import post_order_apply
from composable_fsdp.planning import walk
from composable_fsdp.planning.policies import (
    SizePolicy,
    evaluate_policy,
)
from tests.support.models import build, module_at
from tests.support.recipes import ModelRecipe
from tests.support.strategies import FEATURES, model_recipes

Question = tuple[str, bool, int]

# Where no module has two parents, which FSDP1 would wrap twice.
TREES = model_recipes(features=FEATURES - {"shared"})


def named(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


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
    return walk.subtrees(module_at(model, path) for path in recipe.sharded)


def asked_by(model: nn.Module, log: list[Question], salt: int) -> Callable[..., bool]:
    """A policy that notes each question; its answers depend on ``salt``."""
    names = named(model)

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        log.append((names[module], recurse, nonwrapped_numel))
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return recurse
        return (len(names[module]) * salt + nonwrapped_numel) % 3 != 0

    return policy


@pytest.mark.req("S0-01", "S0-04")
@given(recipe=TREES, min_numel=st.integers(0, 80), salt=st.integers(1, 50))
def test_units_and_questions_are_those_of_fsdp1(
    recipe: ModelRecipe, min_numel: int, salt: int
) -> None:
    """By size, and by any callable, which hears the same questions in one order."""
    heard: list[Question] = []
    expected: list[Question] = []
    legacy = partial(fsdp1.size_based_auto_wrap_policy, min_num_params=min_numel)
    for by_size in (True, False):
        ours, theirs = build(recipe), build(recipe)
        names = named(theirs)
        mine: Any = SizePolicy(min_numel) if by_size else asked_by(ours, heard, salt)
        other: Any = legacy if by_size else asked_by(theirs, expected, salt)

        units = evaluate_policy(
            mine, ours, ignored_modules=some_of(ours, recipe), root_kwargs={}
        )
        wrapped = fsdp1_units(other, theirs, set(some_of(theirs, recipe)))

        found = {named(ours)[module] for module in units}
        assert found == {names[module] for module in wrapped}
    assert heard == expected


@pytest.mark.req("S0-01", "S0-02", "S1-18")
@given(recipe=model_recipes())
def test_targets_are_applied_once_each_and_after_all_targets_below(
    recipe: ModelRecipe,
) -> None:
    """In reverse order where no module has two parents; options arrive with their
    module, and its one replacement stands wherever it stood, and nowhere else."""
    model, seen = build(recipe), dict[nn.Module, Any]()
    targets = {module_at(model, path): {"path": path} for path in recipe.sharded}
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None
    ]
    order = [m for m in model.modules() if m in targets]
    made = {module: nn.Sequential(module) for module in targets}

    def fn(module: nn.Module, options: dict[str, Any]) -> nn.Module:
        assert module not in seen
        below = set(module.modules()) - {module}
        assert below & targets.keys() <= seen.keys()
        seen[module] = options
        return made[module]

    post_order_apply(model, targets, fn)

    assert seen == {m: options for m, options in targets.items() if m is not model}
    for parent, name, child in places:
        assert parent._modules[name] is made.get(child, child)
    if len(places) == len({id(child) for _, _, child in places}):
        assert list(seen) == order[::-1]
