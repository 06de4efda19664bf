"""Finding states: order, alignment, and subtrees that are not entered."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from composable_fsdp import FullyShardedDataParallel, ModuleWrapPolicy, fully_shard
from composable_fsdp.compose.registry import set_state
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import (
    _get_fsdp_handles,
    _get_fsdp_root_states,
    _get_fsdp_states,
    _get_fsdp_states_with_modules,
)
from tests.planning.trees import linears
from tests.support.models import TinyBlock, TinyGPT
from tests.support.world import World


def gpt(layers: int = 2) -> TinyGPT:
    """A model whose blocks and root are units, the last block first."""
    model = TinyGPT(layers=layers)
    for block in reversed(model.blocks):
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.req("S1-21")
def test_the_documented_idioms_find_states_roots_and_handles(one_rank: World) -> None:
    """All states, the outermost ones, and the handles, also from inside the tree."""
    first = gpt()
    model = nn.Sequential(first, gpt())
    states = _get_fsdp_states(model)

    assert len(states) == 6
    assert [state.module for state in _get_fsdp_root_states(model)] == list(model)
    assert _get_fsdp_handles(model) == [state.handle for state in states]
    assert _get_fsdp_states(first) == states[:3]
    assert _get_fsdp_states(first.blocks) == states[1:3]


@pytest.mark.req("S1-28")
def test_the_wrappers_list_of_units_is_the_traversals(one_rank: World) -> None:
    """``fsdp_modules`` of the wrapper are the modules that own the states found."""
    model = FullyShardedDataParallel(
        TinyGPT(), auto_wrap_policy=ModuleWrapPolicy({TinyBlock})
    )

    found = FullyShardedDataParallel.fsdp_modules(model)

    assert [fully_shard.state(each.module) for each in found] == _get_fsdp_states(model)
    assert len(found) == 3


@pytest.mark.req("S1-16", "S1-19")
def test_a_marked_subtree_is_not_entered_though_units_are_in_it(
    one_rank: World,
) -> None:
    """``replicate`` hides the unit below it; the units around it are found."""
    hidden = linears(1)
    model = nn.Sequential(linears(1), nn.Sequential(hidden), linears(1))
    for layer in (model[0], hidden, model[2]):
        fully_shard(layer)
    set_state(model[1], "replicate", object())

    _, modules = _get_fsdp_states_with_modules(model)

    assert modules == [model[0], model[2]]
    assert _get_fsdp_states(model[1]) == []
    assert len(_get_fsdp_states(hidden)) == 1


@pytest.mark.req("X-31")
def test_a_tree_deeper_than_python_recurses_is_sharded(one_rank: World) -> None:
    """Planning, and the contract's comparison of names, keep stacks of their own."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(2 * sys.getrecursionlimit()):
        model = nn.Sequential(model)

    fully_shard(model)

    assert [state.module for state in _get_fsdp_states(model)] == [model]


def test_states_declare_all_their_fields() -> None:
    """A misspelt field is an error, not a new attribute."""
    state = _FSDPState()

    with pytest.raises(AttributeError):
        state.handel = 1  # type: ignore[attr-defined]  # the mistake under test
    with pytest.raises(AttributeError, match="has no attribute 'handel'"):
        _ = state.handel  # type: ignore[attr-defined]  # the mistake under test
