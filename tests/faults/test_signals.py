"""SIGTERM and SIGINT in a step: all ranks save and leave, as the example does."""

from __future__ import annotations

import os
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from composable_fsdp import verify
from tests.support.scripts import launch

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_resume.py"


def stopped_after(text: str) -> int:
    """The step that the example says it has stopped after."""
    found = re.search(r"^stopped after step (\d+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def require_saved(folder: Path, step: int) -> None:
    """The last checkpoint is whole and that of ``step``."""
    name = f"step-{step:06d}"
    found = verify(folder)
    assert found
    assert found.path == str(folder / name)


@pytest.mark.req("X-35")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The checkpoint is that of the step, and the exit status is 0."""

    def tell_last(processes: list[BaseProcess]) -> None:
        output, limit = tmp_path / "output_0", time.monotonic() + 20
        while time.monotonic() < limit:
            if output.exists() and "step 2 loss" in output.read_text():
                break
            time.sleep(0.02)
        pid = processes[-1].pid
        assert pid is not None
        os.kill(pid, number)

    folder = tmp_path / "saves"
    asked = ("--folder", str(folder), "--steps", "500", "--save-every", "500")

    first, last = launch(
        str(EXAMPLE), *asked, ranks=2, folder=tmp_path, meanwhile=tell_last
    )

    assert (first.status, last.status) == (0, 0), first.output + last.output
    step = stopped_after(first.output)
    assert 2 <= step < 500
    require_saved(folder, step)
