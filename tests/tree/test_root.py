"""Lazy initialization: who becomes the root, what it caches, and that it lets go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.errors import CompositionError, NotRootError
from composable_fsdp.flat.handle import LEAVES
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import (
    OWNERS,
    _FSDPState,
    _get_module_fsdp_state,
)
from composable_fsdp.tree.traversal import _get_fsdp_handles, _get_fsdp_states
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
