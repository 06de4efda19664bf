"""The command ``simulate``: a report, a trace for Perfetto, and errors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import Run


@pytest.fixture
def run(run: Run) -> Run:
    """Call ``simulate``: status, standard output and standard error."""
    return partial(run, "simulate")


@pytest.mark.req("N-02")
def test_the_report_is_of_the_layers_that_repeat(
    run: Run, script: str, tmp_path: Path
) -> None:
    """JSON has the peak, collectives by unit and the timeline; a trace is written."""
    status, out, err = run(
        f"{script}:small",
        *("--batch", "2x8", "--world-size", 64, "--max-norm", 1, "--optimizer", "sgd"),
        *("--trace", tmp_path / "step.json", "--json"),
    )
    found: dict[str, Any] = json.loads(out)

    assert (status, err, found["world_size"]) == (0, "", 64)
    assert [each["unit"] for each in found["collectives"]][:4] == [
        "",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    ops = {each["op"] for each in found["collectives"]}
    # The all-reduce is that of the norm.
    assert ops == {"all_gather", "reduce_scatter", "all_reduce"}
    kinds = found["peak"]["by_kind"]
    most = max(sum(each[kind] for kind in kinds) for each in found["timeline"])
    assert found["peak"]["bytes"] == most == sum(kinds.values())
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {"compute", "communication"} <= {
        each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"
    }


@pytest.mark.parametrize(("memory", "expected"), [("1GiB", 0), ("10KiB", 1)])
def test_the_exit_status_says_whether_the_step_fits(
    run: Run, script: str, memory: str, expected: int
) -> None:
    """The text says it, too; the batch is that of the function."""
    status, out, _ = run(f"{script}:small_with_inputs", "--gpu-memory", memory)

    assert status == expected
    assert ("does not fit: " in out) is bool(expected)
    assert "4 units on 8 ranks" in out
    assert "7 x all_gather" in out
