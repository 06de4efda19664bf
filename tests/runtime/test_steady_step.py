"""The common path stays short: a steady step enters few files of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

FILES = {
    "comm/collectives.py",
    "comm/device.py",
    "comm/sequence.py",
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
"""The files that a reader of a forward and a backward needs."""

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
    batch = torch.randn(2, 8)
    for _ in range(4):
        model(batch).sum().backward()
        model.zero_grad()
    sys.setprofile(note)
    model(batch).sum().backward()
    sys.setprofile(None)
print(*entered, sep="\\n")
"""


@pytest.mark.req("S1-03")
def test_a_steady_step_enters_few_files() -> None:
    """Forward and backward of five units, after the first steps, enter ``FILES``."""
    # A fresh interpreter, without the optimizers, flat parameters and registrations of
    # models that other tests made.
    run = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == FILES
    assert len(FILES) <= 12
