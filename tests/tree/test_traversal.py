"""Finding states: order, alignment, and subtrees that are not entered."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import (
    _get_fsdp_handles,
    _get_fsdp_root_states,
    _get_fsdp_states,
)
from tests.support.models import TinyGPT
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
