"""The command ``simulate``: a report, a trace for Perfetto, and errors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import Run

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x

def with_inputs():
    return Net(), torch.zeros(2, 8, dtype=torch.long)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A file with a model; the path to write before a colon."""
    path = tmp_path / "models_to_simulate.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def run(run: Run) -> Run:
    """Call ``simulate``: status, standard output and standard error."""
    return partial(run, "simulate")


@pytest.mark.req("N-02")
def test_the_report_is_of_the_units_and_options_asked_for(
    run: Run, script: str, tmp_path: Path
) -> None:
    """JSON has the peak, collectives by unit and the timeline; a trace is written."""
    status, out, err = run(
        f"{script}:Net",
        *("--batch", "2x8", "--world-size", 64, "--shard-world-size", 8),
        *("--param-dtype", "bfloat16", "--max-norm", 1, "--optimizer", "sgd"),
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
    assert ops == {"all_gather", "reduce_scatter", "all_reduce"}
    most = max(sum(bytes_of(each).values()) for each in found["timeline"])
    assert found["peak"]["bytes"] == most == sum(found["peak"]["by_kind"].values())
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {"compute", "communication"} <= {
        each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"
    }


def bytes_of(moment: dict[str, Any]) -> dict[str, int]:
    """The bytes of a moment, by kind."""
    return {k: v for k, v in moment.items() if k not in ("seconds", "when")}


@pytest.mark.parametrize(("memory", "expected"), [("1GiB", 0), ("10KiB", 1)])
def test_the_exit_status_says_whether_the_step_fits(
    run: Run, script: str, memory: str, expected: int
) -> None:
    """The text says it, too; the batch is that of the function."""
    status, out, _ = run(f"{script}:with_inputs", "--gpu-memory", memory)

    assert status == expected
    assert ("does not fit: " in out) is bool(expected)
    assert "4 units on 8 ranks" in out
    assert "7 x all_gather" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:Net"], "simulate needs --batch, as --batch 4x2048"),
        (["{}:Nets", "--batch", "2x8"], "Did you mean Net?"),
        (["{}:Net", "--batch", "2x8", "--units", "layers.*"], "matches no module"),
        (["{}:Net", "--batch", "2x8", "--trace", "{}/x"], "Not a directory"),
        (["{}:Net", "--batch", "2x8", "--optimizer", "muon"], "invalid choice: 'muon'"),
    ],
)
def test_errors_say_the_way_out(
    run: Run, script: str, arguments: list[str], message: str
) -> None:
    """Status 2, and a line on standard error."""
    status, out, err = run(*[each.format(script) for each in arguments])

    assert (status, out) == (2, "")
    assert message in err
