"""A state dict is of its moment, and one rank's part is never taken for the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from composable_fsdp import (
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
)
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import adamw
from tests.support.sharded import RankCount, both_paths, gpt, step
from tests.support.world import World

LOCAL = StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
WAYS: list[Any] = [
    (SHARDED, None, None),
    (
        SHARDED,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ),
    (
        LOCAL,
        LocalStateDictConfig(offload_to_cpu=True),
        LocalOptimStateDictConfig(offload_to_cpu=True),
    ),
]


def trained(world: World, path: str, seed: int = 0) -> tuple[nn.Module, Any]:
    model = gpt(path, seed=seed)
    optimizer = adamw(model.parameters())
    step(model, optimizer, world.rank, 0)
    return model, optimizer


def parts(state: Any) -> list[Tensor]:
    """Every tensor of this rank in a model's or an optimizer's state dict."""
    values = [v for group in state.get("state", {}).values() for v in group.values()]
    found = [v for v in (values or state.values()) if isinstance(v, Tensor)]
    return [v.local if isinstance(v, ShardedValue) else v for v in found]


@pytest.mark.req("S1-32")
@both_paths
@on_ranks(2)
def test_a_state_dict_keeps_its_values_through_the_next_step(
    world: World, path: str
) -> None:
    """Sharded ones are copies, as FSDP1's; so is what goes to the host."""
    model, optimizer = trained(world, path)
    for number, way in enumerate(WAYS, start=1):
        with state_dict_type(model, *way):
            saved = model.state_dict(), optim_state_dict(model, optimizer)
        before = copy.deepcopy([parts(state) for state in saved])
        step(model, optimizer, world.rank, number)
        with state_dict_type(model, *way):
            now = model.state_dict(), optim_state_dict(model, optimizer)

        for state, kept, later in zip(saved, before, now, strict=True):
            assert kept
            assert all(map(torch.equal, parts(state), kept)), way
            assert not all(map(torch.equal, parts(later), kept)), way


def attempts(saved: dict[str, Any], folder: Path) -> dict[str, Callable[[], object]]:
    copies = {key: value.detach().cpu().clone() for key, value in saved.items()}
    group = dist.new_group(backend="gloo")
    writer = FileSystemWriter(folder)
    return {
        "save": lambda: dcp_save(saved, checkpoint_id=folder),
        "save copies": lambda: dcp_save(copies, checkpoint_id=folder),
        "deepcopy": lambda: dcp_save(copy.deepcopy(saved), checkpoint_id=folder),
        "load": lambda: dcp_load(saved, checkpoint_id=folder),
        "async": lambda: async_save(saved, checkpoint_id=folder, process_group=group),
        "stager": lambda: async_save(saved, storage_writer=writer),
    }


def refusals(world: World, path: str, folder: Path) -> dict[str, str]:
    model, optimizer = trained(world, path)
    with state_dict_type(model, SHARDED):
        dcp_save(model.state_dict(), checkpoint_id=folder)
    with state_dict_type(model, LOCAL):
        weights: Any = model.state_dict()
        state = next(iter(optim_state_dict(model, optimizer)["state"].values()))
    found = {}
    for name, saved in (("model", weights), ("optim", {"m": state["exp_avg"]})):
        for how, attempt in attempts(saved, folder).items():
            with pytest.raises((CheckpointException, RuntimeError)) as error:
                attempt()
            found[f"{name} {how}"] = str(error.value)
    return found


@pytest.mark.req("U-02")
@both_paths
def test_dcp_is_refused_local_state_which_it_would_take_for_whole(
    ranks: RankCount, path: str, tmp_path: Path
) -> None:
    """On every rank, however it is saved or loaded, with the way out that works."""
    for texts in ranks(2).run(refusals, path, tmp_path):
        for how, text in texts.items():
            assert "torch.distributed.checkpoint was given LOCAL_STATE_DICT" in text, (
                how
            )
            assert "Take the state dict under StateDictType.SHARDED" in text, how
        assert "it takes 'tokens.weight' for" in texts["model save"]


@both_paths
@on_ranks(2)
def test_local_values_become_plain_tensors_where_they_are_loaded(
    world: World, path: str
) -> None:
    """The optimizer's state and the parameters are of torch's own class."""
    model, optimizer = trained(world, path)
    with state_dict_type(model, LOCAL):
        saved, state = model.state_dict(), optim_state_dict(model, optimizer)
        other, fresh = trained(world, path, seed=3)
        with state_dict_type(other, LOCAL):
            other.load_state_dict(saved, assign=True)
            fresh.load_state_dict(optim_state_dict_to_load(other, fresh, state))
    assert {type(p.data) for p in other.parameters()} == {Tensor}
    kinds = {type(v) for values in fresh.state.values() for v in values.values()}
    assert kinds == {Tensor}
    assert type(saved["head.weight"] + 1) is Tensor
    step(other, fresh, world.rank, 1)
    step(model, optimizer, world.rank, 1)
    assert _same(dict(other.state_dict()), dict(model.state_dict()))


@on_ranks(1)
def test_one_rank_alone_holds_the_whole_and_dcp_takes_it(
    world: World, tmp_path: Path
) -> None:
    """Nothing is refused where nothing is cut."""
    model, _ = trained(world, "wrapper")
    with state_dict_type(model, LOCAL):
        dcp_save(dict(model.state_dict()), checkpoint_id=tmp_path)
        other, _ = trained(world, "wrapper", seed=3)
        found = other.state_dict()
        dcp_load(found, checkpoint_id=tmp_path)
    assert _same(dict(found), dict(model.state_dict()))
