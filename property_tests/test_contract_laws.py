"""Laws of the contract: it refuses exactly the changes that show in torch's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp.compose.contract import contract
from composable_fsdp.errors import CompositionError
from tests.support import models
from tests.support.recipes import ModelRecipe
from tests.support.strategies import model_recipes


class State:
    """Nothing to remember."""


class Edit(NamedTuple):
    """A change at the ``where``-th name of the whole tree (counted round)."""

    how: str
    where: int


EDITS = st.builds(
    Edit,
    st.sampled_from(["rename", "renew", "remove", "clear", "move to the end", "add"]),
    st.integers(0, 30),
)
ABSENT = st.integers(0, 63)
"""Bits: which modules have names that are registered as None."""


def build(recipe: ModelRecipe, absent: int) -> nn.Module:
    model = models.build(recipe)
    for index, module in enumerate(list(model.modules())):
        if absent >> index & 1:
            module.register_parameter("no_parameter", None)
            module.register_buffer("no_buffer", None)
            if not isinstance(module, nn.ModuleList):
                module.register_module("no_module", None)
    return model


def names_by_torch(module: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Return the names of parameters, buffers and modules in torch's order."""

    def names(pairs: Iterable[tuple[str, object]]) -> list[str]:
        return [name for name, _ in pairs]

    return (
        names(module.named_parameters(remove_duplicate=False)),
        names(module.named_buffers(remove_duplicate=False)),
        names(module.named_modules(remove_duplicate=False)),
    )


def perform(edit: Edit, module: nn.Module) -> None:
    """Change one of the tables of ``module`` or of a module below it."""
    tables: list[dict[str, Any]] = [
        table
        for each in module.modules()
        for table in (each._parameters, each._buffers, each._modules)
    ]
    places = [(table, name) for table in tables for name in table]
    if not places:
        return
    table, name = places[edit.where % len(places)]
    if edit.how == "renew":
        for each in module.modules():
            each.note = "kept"  # type: ignore[assignment]  # any attribute will do
            each.register_forward_hook(lambda *_: None)
            for key, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[key] = nn.Parameter(torch.ones(2))
        return
    if edit.how == "clear":
        table[name] = None
        return
    if edit.how == "add":
        table["added"] = table[name]
        return
    value = table.pop(name)
    if edit.how == "rename":
        table["renamed"] = value
    elif edit.how == "move to the end":
        table[name] = value


def api_of(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], nn.Module]:
    @contract(State)
    def api(module: nn.Module) -> None:
        change(module)

    return api


@given(recipe=model_recipes(), absent=ABSENT, edit=EDITS)
@pytest.mark.req("S1-35")
def test_an_edit_is_refused_exactly_when_torch_sees_other_names(
    recipe: ModelRecipe, absent: int, edit: Edit
) -> None:
    """What is renamed, removed or reordered is refused, and nothing else is: neither
    other parameters under the old names, nor attributes and hooks."""
    module = build(recipe, absent)
    before = names_by_torch(module)

    shown = refusal(edit, module)

    event(f"{edit.how}: {'accepted' if shown is None else 'refused'}")
    assert (shown is not None) == (names_by_torch(module) != before)
    assert (shown is not None) == ("_composable_api_states" not in module.__dict__)
    assert shown is None or " and is now " in shown


def refusal(edit: Edit, module: nn.Module) -> str | None:
    """Apply an API that makes ``edit``; return the error's text, None if accepted."""
    try:
        api_of(lambda m: perform(edit, m))(module)
    except CompositionError as error:
        return str(error)
    return None
