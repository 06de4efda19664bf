"""Laws of the contract: it refuses exactly the changes that show in torch's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp.compose.contract import contract
from composable_fsdp.errors import CompositionError


class State:
    """Nothing to remember."""


@dataclass(frozen=True)
class Tree:
    """A module to build: each name is set (True) or registered as None (False)."""

    parameters: tuple[tuple[str, bool], ...]
    buffers: tuple[tuple[str, bool], ...]
    children: tuple[tuple[str, Tree | None], ...]
    is_tied: bool
    """Whether the first child is there a second time, as ``again``."""


@dataclass(frozen=True)
class Edit:
    """A change at the ``where``-th name of the whole tree (counted round)."""

    how: str
    where: int


def slots(prefix: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Up to three distinct names with a value each; kinds never share a name."""
    names = st.sampled_from([f"{prefix}{i}" for i in range(4)])
    pairs = st.lists(st.tuples(names, values), max_size=3, unique_by=lambda p: p[0])
    return pairs.map(tuple)


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Tree]:
    given_or_none = st.booleans()
    return st.builds(
        Tree,
        slots("p", given_or_none),
        slots("b", given_or_none),
        children,
        st.booleans(),
    )


def trees() -> st.SearchStrategy[Tree]:
    leaves = nodes(st.just(()))
    return st.recursive(
        leaves, lambda inner: nodes(slots("m", st.none() | inner)), max_leaves=6
    )


def edits() -> st.SearchStrategy[Edit]:
    kinds = st.sampled_from(["rename", "remove", "clear", "move to the end"])
    return st.builds(Edit, kinds, st.integers(0, 30))


def build(tree: Tree) -> nn.Module:
    module = nn.Module()
    for name, is_set in tree.parameters:
        parameter = nn.Parameter(torch.zeros(1)) if is_set else None
        module.register_parameter(name, parameter)
    for name, is_set in tree.buffers:
        module.register_buffer(name, torch.zeros(1) if is_set else None)
    for name, child in tree.children:
        module.register_module(name, None if child is None else build(child))
    first = next(iter(module._modules.values()), None)
    if tree.is_tied and first is not None:
        module.register_module("again", first)
    return module


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
    if edit.how == "clear":
        table[name] = None
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


@given(tree=trees())
@pytest.mark.req("S1-35")
def test_what_keeps_names_and_order_is_accepted(tree: Tree) -> None:
    """New parameters under the old names, attributes and hooks violate nothing."""

    def renew(module: nn.Module) -> None:
        for each in module.modules():
            each.note = "kept"  # type: ignore[assignment]  # any attribute will do
            each.register_forward_hook(lambda *_: None)
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[name] = nn.Parameter(torch.ones(2))

    module = build(tree)
    before = names_by_torch(module)

    assert api_of(renew)(module) is module
    assert names_by_torch(module) == before


@given(tree=trees(), edit=edits())
@pytest.mark.req("S1-35")
def test_an_edit_is_refused_exactly_when_torch_sees_other_names(
    tree: Tree, edit: Edit
) -> None:
    """What is renamed, removed or reordered is refused, and nothing else is; the
    difference shown is the first one in torch's own lists."""
    module, edited = build(tree), build(tree)
    before = names_by_torch(module)
    perform(edit, edited)
    expected = first_difference(before, names_by_torch(edited))

    shown = refusal(edit, module)

    event(f"{edit.how}: {'accepted' if shown is None else 'refused'}")
    assert (shown is not None) == (names_by_torch(module) != before)
    assert (shown is not None) == ("_composable_api_states" not in module.__dict__)
    assert (shown is None) == (expected is None)
    assert (expected or "") in (shown or "")


def refusal(edit: Edit, module: nn.Module) -> str | None:
    """Apply an API that makes ``edit``; return the error's text, None if accepted."""
    try:
        api_of(lambda m: perform(edit, m))(module)
    except CompositionError as error:
        return str(error)
    return None


def first_difference(
    before: tuple[list[str], ...], after: tuple[list[str], ...]
) -> str | None:
    """Say the first difference by brute force, without the code under test."""
    kinds = ("parameter", "buffer", "module")
    for kind, olds, news in zip(kinds, before, after, strict=True):
        for index in range(max(len(olds), len(news))):
            old = repr(olds[index]) if index < len(olds) else "absent"
            new = repr(news[index]) if index < len(news) else "absent"
            if old != new:
                return f": {kind} {index} was {old} and is now {new}."
    return None
