"""The tree of states: its walk, the order of uses, and the root with the caches."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.errors import CompositionError, NotRootError
from composable_fsdp.flat.handle import LEAVES
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import (
    OWNERS,
    StepOrder,
    _FSDPState,
    _get_module_fsdp_state,
)
from composable_fsdp.tree.traversal import (
    _get_fsdp_handles,
    _get_fsdp_root_states,
    _get_fsdp_states,
)
from tests.planning.trees import linears
from tests.support.models import TinyGPT
from tests.support.world import World


def nested() -> nn.Sequential:
    """Three layers; the first two and the whole are units."""
    model = linears(3)
    fully_shard(model[0])
    fully_shard(model[1])
    return fully_shard(model)


def state_of(module: nn.Module) -> _FSDPState:
    state = _get_module_fsdp_state(module)
    assert state is not None
    return state


@pytest.mark.req("S1-04", "S1-05")
@pytest.mark.parametrize("name", ["_all_fsdp_states", "_all_handles"])
def test_only_the_root_has_the_caches(one_rank: World, name: str) -> None:
    """Elsewhere the attribute is absent, and the error names the module."""
    layers = nested()
    model = fully_shard(nn.Sequential(nn.Sequential(layers)))
    inner = state_of(layers[1])
    assert not hasattr(state_of(model), name)

    ensure_root(inner)

    assert hasattr(state_of(model), name)
    assert not hasattr(inner, name)
    with pytest.raises(
        NotRootError, match=rf"{name} is kept on the root only; unit '0.0.1' "
    ):
        getattr(inner, name)


@pytest.mark.req("S1-24")
@pytest.mark.parametrize("name", ["limit_all_gathers", "use_orig_params"])
def test_settings_of_a_whole_tree_must_agree(one_rank: World, name: str) -> None:
    """A difference raises at the first forward at the latest, with both names."""
    model = nn.Sequential(linears(1), linears(1))
    fully_shard(model[0])
    different: dict[str, Any] = {name: False}
    fully_shard(model[1], **different)

    with pytest.raises(
        CompositionError,
        match=rf"{name} must be equal in one tree: .*has (True|False), '1' has False",
    ):
        fully_shard(model)(torch.ones(1, 4))


def test_a_list_of_modules_cannot_be_the_root(one_rank: World) -> None:
    """It has no forward that begins an iteration; the message says what to shard."""
    first, second = nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False)
    second.weight = None  # type: ignore[assignment]  # a layer without parameters
    fully_shard([first, second])

    with pytest.raises(
        CompositionError, match="The outermost unit is a list of 2 modules"
    ):
        first(torch.ones(1, 4))


@pytest.mark.req("S1-30")
@pytest.mark.usefixtures("few_objects")
def test_a_model_that_is_gone_leaves_nothing_behind(
    one_rank: World,
) -> None:
    """States, handles, memory and entries vanish with the module."""
    gc.collect()
    # Keys, not counts: models of other tests may die meanwhile.
    owners, leaves = set(OWNERS._entries), set(LEAVES)
    model = nested()
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    gone = [weakref.ref(state) for state in _get_fsdp_states(model)]
    gone_handles = [weakref.ref(handle) for handle in _get_fsdp_handles(model)]
    gone_tensors = [
        weakref.ref(tensor)
        for handle in _get_fsdp_handles(model)
        for region in handle.layout.regions
        for tensor in (region.shard, *region.leaves, *region.full.leaves)
    ]
    assert set(OWNERS._entries) - owners

    del model
    gc.collect()

    assert [ref() for ref in gone] == [None] * 3
    assert [ref() for ref in gone_handles] == [None] * 3
    assert {ref() is None for ref in gone_tensors} == {True}
    assert set(OWNERS._entries) <= owners
    assert set(LEAVES) <= leaves


@pytest.mark.usefixtures("few_objects")
def test_a_model_is_collected_after_an_aborted_forward(one_rank: World) -> None:
    """A raise in the middle of a forward keeps no state alive."""
    model = TinyGPT()
    fully_shard(model.blocks[0])
    fully_shard(model)
    with pytest.raises(IndexError):
        model(torch.full((1, 3), 99))
    gone = weakref.ref(state_of(model))

    del model
    gc.collect()

    assert gone() is None


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
    pair = linears(2)
    fully_shard([*pair])
    assert len(_get_fsdp_states(pair)) == 1


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


def recorded(units: str) -> Any:
    """An order of strings, in the place of states."""
    order: Any = StepOrder()
    for unit in units:
        order.add(unit)
    return order


@pytest.mark.req("D-02", "S1-40")
@given(units=st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_walking_back_gives_the_uses_in_reverse(units: list[str]) -> None:
    """From each use, the unit before is the nearest earlier one that is another."""
    order = recorded("".join(units))

    for index, unit in enumerate(units):
        others = [u for u in units[:index] if u != unit]
        assert order.before(index) == (others[-1] if others else None)
