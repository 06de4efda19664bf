"""torch's checkpoints between the plain model, FSDP2, our wrapper and our composable.

Whatever one of them saved with torch.distributed.checkpoint any other loads, at any
world size: weights and the whole state of AdamW.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from composable_fsdp import (
    StateDictType,
    optim_state_dict,
    state_dict_type,
)
from tests.support.models import TinyGPT
from tests.support.place import _same
from tests.support.reference import PATHS, adamw, apply_units
from tests.support.sharded import UNITS, RankCount, step
from tests.support.world import World

KINDS = ("plain", "fsdp2", *PATHS)
FULL = StateDictOptions(full_state_dict=True)


def make(
    kind: str, seed: int, units: tuple[str, ...] = UNITS
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = TinyGPT(seed=seed)
    if kind in PATHS:
        model = apply_units(model, units, path=kind)
    if kind == "fsdp2":
        for block in [*model.blocks, model]:
            torch_fsdp.fully_shard(block)
    return model, adamw(model.parameters())


@cache
def trained() -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and AdamW's state of the plain model after two steps; alike anywhere.

    Made once in a process, so nobody may change them.
    """
    model, optimizer = make("plain", 3)
    for at in range(2):
        step(model, optimizer, 0, at)
    optimizer.param_groups[0]["lr"] = 0.03
    return get_state_dict(model, optimizer)


def plain(value: Any) -> Any:
    """With dicts and lists only: torch's checkpoint gives lists back for tuples."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return list(value) if isinstance(value, tuple) else value


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return get_state_dict(model, optimizer, options=FULL)


def save(world: World, kind: str, folder: Path) -> None:
    model, optimizer = make(kind, 5)
    weights, state = copy.deepcopy(trained())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=state,
        options=FULL,
    )
    if kind in PATHS:
        with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = model.state_dict(), optim_state_dict(model, optimizer)
    else:
        saved = get_state_dict(model, optimizer)
    dcp_save({"model": saved[0], "optim": saved[1]}, checkpoint_id=folder)


def load(world: World, kind: str, folder: Path) -> None:
    model, optimizer = make(kind, 7, ("blocks.0.up", "blocks.1"))  # another policy
    weights, state = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": weights, "optim": state}
    dcp_load(found, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optim"],
    )

    for ours, theirs in zip(whole(model, optimizer), trained(), strict=True):
        assert _same(plain(ours), plain(theirs))


@pytest.fixture(scope="module")
def saved(
    ranks: RankCount, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Path]:
    """The checkpoint that a model of some kind saved on so many ranks."""

    @cache
    def folder_of(kind: str, world_size: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-{world_size}")
        ranks(world_size).run(save, kind, folder)
        return folder

    return folder_of


@pytest.mark.few(2)
@pytest.mark.req("S1-32", "S1-15", "D-19", "U-07")
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("loading", KINDS)
@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("saving", KINDS)
def test_what_one_saved_each_loads_at_any_world_size(
    ranks: RankCount,
    saved: Callable[[str, int], Path],
    saving: str,
    before: int,
    loading: str,
    after: int,
) -> None:
    """Equal weights, AdamW state and options, through torch's own functions."""
    folder = saved(saving, before)

    ranks(after).run(load, loading, folder)
