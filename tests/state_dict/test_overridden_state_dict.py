"""State dicts of modules whose class has a ``state_dict`` of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    FullStateDictConfig,
    StateDictType,
    state_dict_type,
)
from tests.optim.models import INPUT, Mixed
from tests.optim.test_names import Parallel, put
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.recording import record_steps
from tests.support.sharded import RankCount, both_paths
from tests.support.world import World


class Added(nn.Module):
    """Adds to what torch gives, as many classes do; with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixed()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.gain

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


def around(model: nn.Module, path: str) -> nn.Module:
    """The unit's module itself passes calls on."""
    unit: nn.Module = put(Parallel(model), path)
    return unit


def between(model: nn.Module, path: str) -> nn.Module:
    """A module between the unit's and its parameters does."""
    unit: nn.Module = put(nn.Sequential(Parallel(model)), path)
    return unit


def inside(model: nn.Module, path: str) -> nn.Module:
    """A module of the unit does, and others do not."""
    model.second = Parallel(model.get_submodule("second"))
    unit: nn.Module = put(model, path)
    return unit


def twice(model: nn.Module, path: str) -> nn.Module:
    """One that does in another one."""
    unit: nn.Module = put(Parallel(Parallel(model)), path)
    return unit


def plain(make: Any) -> nn.Module:
    model = Mixed()
    if make is inside:
        model.second = Parallel(model.get_submodule("second"))  # type: ignore[assignment]
        return model
    if make is between:
        return nn.Sequential(Parallel(model))
    return Parallel(model)


@pytest.mark.req("S1-07")
@pytest.mark.parametrize("make", [around, between, inside, twice])
@both_paths
@on_ranks(2)
def test_calls_that_a_module_passes_on_still_give_full_parameters(
    world: World, make: Any, path: str
) -> None:
    """Under the plain model's names; never a shard that looks like a whole."""
    expected = plain(make).state_dict()
    model = make(Mixed(), path)

    found = model.state_dict()
    first = FullStateDictConfig(rank0_only=True)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, first):
        once = model.state_dict()
    model(INPUT(0, 0))

    assert _same(dict(found), dict(expected))
    assert _same(dict(once), dict(expected) if world.rank == 0 else {})


@pytest.mark.req("S1-07")
@on_ranks(2)
def test_what_such_a_model_gave_it_takes(world: World) -> None:
    """As the plain one does."""
    for make in (around, twice):
        model = make(Mixed(seed=3), "composable")
        model.load_state_dict(Mixed().state_dict())
        assert _same(dict(model.state_dict()), dict(Mixed().state_dict()))


def check_added(world: World, path: str) -> list[str]:
    model, expected = put(Added(), path), Added().state_dict()
    with record_steps() as calls:
        found = model.state_dict()
    assert _same(dict(found), dict(expected))
    model.load_state_dict({k: v + 1 for k, v in expected.items()})
    again = model.state_dict()
    with state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        once = model.state_dict()
    with state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = model.state_dict()
        model.load_state_dict(local)

    assert _same(dict(again), {k: v + 1 for k, v in expected.items()})
    assert list(once) == (list(expected) if world.rank == 0 else [])
    return [call.op for call in calls]


@pytest.mark.req("S1-07")
@both_paths
def test_a_class_that_adds_to_torchs_state_dict_saves_and_loads(
    ranks: RankCount, path: str
) -> None:
    """Parameters of its own and those below it, each once; buffers as well."""
    for ops in ranks(2).run(check_added, path):
        assert ops == ["all_gather"]
