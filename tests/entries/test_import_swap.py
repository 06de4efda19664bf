"""Scripts for torch's FSDP1 and FSDP2 find the same with their imports changed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sharded import RankCount
from tests.support.world import World

TORCH = "torch.distributed.fsdp"


def run_script(world: World, name: str, package: str, *arguments: Any) -> Any:
    """Run the script's text with its imports from ``package``; what it returns."""
    text = Path(__file__).with_name(name).read_text().replace(TORCH, package)
    names: dict[str, Any] = {"__name__": f"script_for_{package}"}
    with warnings.catch_warnings():
        if package == TORCH:
            warnings.simplefilter("ignore")  # torch's own of what it deprecates
        exec(compile(text, name, "exec"), names)
        return names["main"](*arguments)


def numbers(value: Any) -> Any:
    """``value`` with floats that compare within a tolerance."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-4, abs=1e-5)
    if isinstance(value, list):
        return [numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: numbers(each) for key, each in value.items()}
    return value


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_script_for_fsdp1_runs_with_its_imports_changed(
    ranks: RankCount, strategy: str
) -> None:
    """Losses, norms, scales, sums of values and gradients, names: all are equal."""
    script = "fsdp1_script.py"
    theirs = ranks(2).run(run_script, script, TORCH, strategy, False)
    ours = ranks(2).run(run_script, script, "composable_fsdp", strategy, True)

    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            assert mine[key] == numbers(value), key


def assert_same(ranks: RankCount, world_size: int, case: str) -> None:
    script = "fsdp2_script.py"
    theirs = ranks(world_size).run(run_script, script, TORCH, case)
    ours = ranks(world_size).run(run_script, script, "composable_fsdp.fsdp2", case)

    tolerance = 2e-2 if "bf16" in case else 1e-5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(other["losses"], rel=tolerance)
        assert list(mine["state"]) == list(other["state"])
        for name, value in other["state"].items():
            torch.testing.assert_close(
                torch.tensor(mine["state"][name]),
                torch.tensor(value),
                rtol=tolerance,
                atol=tolerance,
            )


CASES = [
    "plain",
    "bf16",
    "bf16 reduced in fp32",
    "fp32 out of bf16",
    "kept",
    "resharded",
    "number of ranks",
    "one rank",
    "offload",
    "ignored",
    "placed",
    "list",
    "prefetch",
    "factor",
    "hook",
    "set resharding",
    "method",
    "shared",
    "event",
    "accumulate",
    "keep and accumulate",
    "by hand",
    "clipped",
    "recovered",
]


@pytest.mark.few(6)
@pytest.mark.req("N-05")
@pytest.mark.parametrize("case", CASES)
def test_a_script_for_fsdp2_runs_with_its_import_changed(
    ranks: RankCount, case: str
) -> None:
    """Losses and full state dicts are equal."""
    assert_same(ranks, 2, case)


@pytest.mark.req("N-05")
def test_a_script_for_two_dims_runs_with_its_import_changed(ranks: RankCount) -> None:
    """Two replicas of two shards, whose sums wait."""
    assert_same(ranks, 4, "replicas, accumulate shards")
