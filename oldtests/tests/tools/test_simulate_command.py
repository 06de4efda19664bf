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
def test_the_report_is_of_the_units_and_options_asked_for(
    run: Run, script: str, tmp_path: Path
) -> None:
    """JSON has the peak, collectives by unit and the timeline; a trace is written."""
    status, out, err = run(
        f"{script}:small",
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


CUT = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def cut(mesh):
    net = Net()
    for block in net.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return net, torch.zeros(2, 256)

def whole(mesh):
    return Net()
"""

SIZES = ("--world-size", "16", "--tensor-parallel-size", "4")


@pytest.fixture
def cut(tmp_path: Path) -> str:
    """A file with functions of a mesh; the path to write before a colon."""
    path = tmp_path / "models_to_cut.py"
    path.write_text(CUT)
    return str(path)


@pytest.mark.req("N-02")
def test_a_function_of_the_mesh_is_simulated_and_planned_alike(
    run: Run, cut: str
) -> None:
    """The peaks are equal, and the collectives of the model itself are listed."""
    plan = partial(run.func, "plan")  # type: ignore[attr-defined]  # a partial

    status, out, err = run(f"{cut}:cut", *SIZES, "--json")
    planned = json.loads(plan(f"{cut}:cut", *SIZES, "--json")[1])
    found: dict[str, Any] = json.loads(out)

    assert (status, err) == (0, "")
    assert (found["world_size"], found["data_ranks"]) == (16, 4)
    own = [each for each in found["collectives"] if each["by_model"]]
    # Of 2 x 256 numbers, the sum of the parts: in forward, and in backward but for the
    # first block, whose input needs no gradient.
    assert {(each["group"], each["ranks"], each["bytes"]) for each in own} == {
        ("tp", 4, 2048)
    }
    assert [each["op"] for each in own] == 5 * ["all_reduce"]
    assert found["peak"]["bytes"] == pytest.approx(planned["peak"]["bytes"], rel=0.01)
    assert planned["options"]["world_size"] == 16
    assert planned["options"]["tensor_parallel_size"] == 4
    assert planned["options"]["shard_world_size"] == 4
    whole = 3 * (2 * 256 * 1024 + 1024 + 256)
    assert planned["model"]["whole_parameters"] == whole
    assert planned["model"]["parameters"] < whole / 3.9


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:cut"], "or pass --tensor-parallel-size, and the argument is the mesh"),
        (["{}:whole", "--tensor-parallel-size", "4"], "is a DTensor"),
        (["config.json", "--tensor-parallel-size", "4"], "does not say how its model"),
    ],
)
def test_a_mesh_that_cannot_be_is_named(
    run: Run, cut: str, command: str, arguments: list[str], message: str
) -> None:
    """By both commands, with status 2."""
    call = partial(run.func, command)  # type: ignore[attr-defined]  # a partial

    status, _, err = call(*[each.format(cut) for each in arguments], "--batch", "2x256")

    assert (status, message in err) == (2, True)
