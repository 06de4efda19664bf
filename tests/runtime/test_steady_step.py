"""The common path stays short: a steady step enters few files of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import composable_fsdp
from composable_fsdp import fully_shard
from composable_fsdp.runtime import graph_task, recover
from tests.support.world import fake_world

_PACKAGE = Path(composable_fsdp.__file__).parent

FILES = {
    "comm/collectives.py",
    "comm/device.py",
    "comm/order_log.py",
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


@pytest.mark.req("S1-03")
def test_a_steady_step_enters_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of five units, after the first steps, enter ``FILES``."""
    entered: set[str] = set()
    # Without the flat parameters and the registrations that models of other tests have.
    monkeypatch.setattr(graph_task, "FLAT_PARAMS", {})
    monkeypatch.setattr(recover, "PENDING", {})

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_PACKAGE):
            entered.add(path.relative_to(_PACKAGE).as_posix())

    with fake_world(4):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        batch = torch.randn(2, 8)
        for _ in range(4):
            model(batch).sum().backward()
            model.zero_grad()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            model(batch).sum().backward()
        finally:
            sys.setprofile(before)
    assert entered == FILES
    assert len(FILES) <= 12
