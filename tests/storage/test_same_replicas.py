"""Replicas that differ are told by name at a save, which would mix them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CheckpointError,
    ShardingStrategy,
    async_save,
    fully_shard,
    save,
)
from tests.support.sharded import RankCount
from tests.support.world import World


def model_of(strategy: str, check_weights: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    options: dict[str, Any] = {
        "strategy": ShardingStrategy[strategy],
        "check_weights": check_weights,
    }
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        options["device_mesh"] = mesh
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def diverge(world: World, model: nn.Module, how: str) -> None:
    """Let the last replica have other values of the last layer."""
    x = torch.ones(2, 8) * (world.rank + 1)
    model(x).sum().backward()
    last = world.rank >= world.world_size // 2
    if how == "data" and last:
        model.get_parameter("2.weight").data.add_(1.0)
    elif how == "step":
        torch.optim.SGD(model.parameters(), lr=0.1 + last).step()


def saved(
    world: World, strategy: str, check_weights: str, how: str, path: Path
) -> tuple[str, list[str]]:
    """Return the error and the warnings of a save."""
    model = model_of(strategy, check_weights)
    diverge(world, model, how)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if how != "step":
                save(path, model)
            else:
                async_save(path, model).result()
        except CheckpointError as raised:
            error = str(raised)
    return error, [str(each.message) for each in caught]


@pytest.mark.req("X-13")
@pytest.mark.parametrize(
    ("strategy", "size", "who", "how"),
    [
        ("NO_SHARD", 2, "on rank 0 than on rank 1,", "step"),
        ("HYBRID_SHARD", 4, "on rank 0 than on rank 2,", "data"),
    ],
)
def test_replicas_that_differ_are_warned_of(
    ranks: RankCount, tmp_path: Path, strategy: str, size: int, who: str, how: str
) -> None:
    """Once, on rank 0, with the first parameter and the ranks."""
    run = saved, strategy, "warn", how, tmp_path / "saved"
    found = ranks(size).run(*run)

    assert [error for error, _ in found] == [""] * size
    first, *others = [
        [text for text in texts if text.startswith("Replicas differ")]
        for _, texts in found
    ]
    name = "'2.weight'" if how == "data" else "'2.weight' (and 3 more parameters)"
    assert len(first) == 1
    assert f"parameter {name} has other values {who}" in first[0]
    assert not any(others)


@pytest.mark.req("X-13")
def test_replicas_that_differ_are_refused_or_ignored_as_told(
    ranks: RankCount, tmp_path: Path
) -> None:
    """All ranks raise alike, and nothing is written."""
    path = tmp_path / "saved"
    for error, texts in ranks(2).run(saved, "NO_SHARD", "error", "data", path):
        assert error.startswith("Replicas differ: parameter '2.weight' has other")
        assert "nothing was written" in error
        assert not texts
    assert not (path / "manifest.json").exists()
    for error, texts in ranks(2).run(saved, "NO_SHARD", "off", "data", path):
        assert not error
        assert not texts
    assert path.exists()
