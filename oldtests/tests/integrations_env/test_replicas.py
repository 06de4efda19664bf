"""A replica that is killed joins again, with torchft, whose manager decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft")

EXAMPLE = Path(__file__).parents[2] / "examples" / "replicas.py"


def example() -> Any:
    spec = util.spec_from_file_location("replicas", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_plain(replicas: list[int], ranks: int) -> dict[str, torch.Tensor]:
    """Weights of the plain model after steps with so many replicas each."""
    code = example()
    model = code.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, number in enumerate(replicas):
        optimizer.zero_grad()
        for replica in range(number):
            for rank in range(ranks):
                loss = code.loss_of(model, step, replica, rank) / (number * ranks)
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.req("M-08")
@pytest.mark.timeout(300)
def test_a_killed_replica_joins_and_training_is_that_of_who_was_alive(
    tmp_path: Path,
) -> None:
    """SIGKILL to all its processes; both end with the weights of the plain model."""
    ranks = 2
    command = [sys.executable, str(EXAMPLE), "--steps", "6", "--ranks", str(ranks)]
    command += ["--folder", str(tmp_path)]
    here = {"PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, env={**os.environ, **here}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]

    lines = (tmp_path / "replica-0.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert [each["step"] for each in told] == list(range(len(told)))
    alive = [each["replicas"] for each in told]
    assert set(alive) == {1, 2}
    assert alive[-1] == 2
    expected = as_plain(alive, ranks)
    for replica in (0, 1):
        found = torch.load(tmp_path / f"replica-{replica}.pt")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
