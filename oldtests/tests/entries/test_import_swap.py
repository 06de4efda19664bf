"""A script for torch's FSDP1 runs with its import lines changed, and finds the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.sharded import RankCount
from tests.support.world import World

SCRIPT = Path(__file__).with_name("fsdp1_script.py")


def run_script(
    world: World, package: str, strategy: str, offload: bool
) -> dict[str, Any]:
    """Run the script's text with its imports from ``package``; what it prints."""
    text = SCRIPT.read_text().replace("torch.distributed.fsdp", package)
    names: dict[str, Any] = {"__name__": f"script_for_{package}"}
    with warnings.catch_warnings():
        if package != "composable_fsdp":
            warnings.simplefilter("ignore")  # torch's own of what it deprecates
        exec(compile(text, SCRIPT.name, "exec"), names)
        result: dict[str, Any] = names["main"](strategy, offload)
    return result


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
    theirs = ranks(2).run(run_script, "torch.distributed.fsdp", strategy, False)
    ours = ranks(2).run(run_script, "composable_fsdp", strategy, True)

    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            assert mine[key] == numbers(value), key
