"""The common path stays short: a steady step enters few files of the package."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

from composable_fsdp import fully_shard, plan, unshard_params
from composable_fsdp.comm.operations import OPEN
from tests.support.on_ranks import on_ranks
from tests.support.scripts import run_script
from tests.support.world import World, fake_world

FILES = {
    "comm/collectives.py",
    "comm/operations.py",
    "features/guard/order_log.py",
    "flat/gradients.py",
    "flat/residency.py",
    "runtime/backward.py",
    "runtime/forward.py",
    "runtime/graph_task.py",
    "runtime/recover.py",
    "runtime/reduce.py",
    "runtime/unshard.py",
    "tree/state.py",
}
"""The files that a reader of a forward and a backward on the CPU needs; the streams of
CUDA are in ``comm.device``."""

STEP = """
import sys
from pathlib import Path

import torch
from torch import nn

import composable_fsdp
from composable_fsdp import fully_shard
from tests.support.world import fake_world

package = Path(composable_fsdp.__file__).parent
entered = set()


def note(frame, event, _):
    path = Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to(package):
        entered.add(path.relative_to(package).as_posix())


with fake_world(4):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2, 8)
    for _ in range(4):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(note)
    model(batch).sum().backward()
    sys.setprofile(None)
print(*entered, sep="\\n")
"""


@pytest.mark.req("S1-03")
def test_a_steady_step_enters_few_files(tmp_path: Path) -> None:
    """Forward and backward of five units, after the first steps, enter ``FILES``."""
    # A process without the optimizers, flat parameters and registrations of models that
    # other tests made.
    (tmp_path / "step.py").write_text(STEP)
    status, output = run_script("step.py", ranks=1, folder=tmp_path)
    assert status == 0, output
    assert set(output.split()) == FILES
    assert len(FILES) <= 12


# ---- what a user sees of units ----


def two_blocks() -> nn.Sequential:
    """Two layers, which are units, in a root with a layer of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model[1])
    return fully_shard(model)


@pytest.mark.req("N-07")
@on_ranks(2)
def test_a_profile_has_the_names_of_the_units(world: World) -> None:
    """Forward, backward and each collective of a step, and nothing stays open."""
    model = two_blocks()
    batch = torch.ones(2, 4, requires_grad=True)
    torch.autograd.backward(model(batch).sum())

    with profile() as prof:
        torch.autograd.backward(model(batch).sum())

    events: list[Any] = list(prof.events() or ())
    found = Counter(event.name.removeprefix("composable_fsdp::") for event in events)
    for unit in ("(root)", "(0)", "(1)"):
        assert found[f"forward {unit}"] == 1
        assert found[f"backward {unit}"] == 1
        assert found[f"all_gather {unit}"] >= 1
        assert found[f"reduce_scatter {unit}"] == 1
        assert found[f"reduce_scatter_wait {unit}"] == 1
    assert OPEN == {}


@pytest.mark.req("N-07")
def test_the_first_step_logs_one_line_with_the_numbers_of_the_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the first forward only; the numbers are those of ``plan``."""
    caplog.set_level(logging.INFO, "composable_fsdp")
    with fake_world(4):
        model = two_blocks()
        for _ in range(2):
            torch.autograd.backward(model(torch.ones(2, 4)).sum())
        expected = plan(model)

    (record,) = caplog.records
    assert record.name == "composable_fsdp"
    assert record.getMessage() == (
        "3 units, 60 parameters over 4 ranks (FULL_SHARD), per rank: parameters "
        f"{expected.parameter_bytes} B, gradients {expected.gradient_bytes} B, peak of "
        f"a training step {expected.peak(device_type='cpu').total} B in "
        f"{expected.peak(device_type='cpu').when}, without activations and optimizer "
        "states"
    )


@pytest.mark.req("N-07")
def test_print_shows_the_units_and_the_classes_stay() -> None:
    """A line per unit, whole for a module without children."""
    with fake_world(4):
        inner = nn.Linear(4, 4)
        inner.bias.requires_grad_(False)
        model = nn.Sequential(nn.Sequential(inner), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model[1])

        assert str(model) == (
            "Sequential(\n"
            "  (0): Sequential(\n"
            "    unit sharded over 4 ranks: 20 parameters, 4 frozen, 32 B per rank\n"
            "    (0): Linear(in_features=4, out_features=4, bias=True)\n"
            "  )\n"
            "  (1): Linear(in_features=4, out_features=4, bias=True, unit sharded over "
            "4 ranks: 20 parameters, 32 B per rank)\n"
            ")"
        )
        assert type(model[1]) is nn.Linear
        fully_shard(model)
        with unshard_params(model):
            assert str(model[1]).endswith("32 B per rank, full now)")
