"""The example of elastic training, as its reader runs it: torchrun and kill -9."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from composable_fsdp import verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_resume.py"
STEPS, BROKEN_AT = 6, 4
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def torchrun(ranks: int, folder: Path, *more: str) -> tuple[int, dict[int, float], str]:
    """Exit status, losses by step, and all that was printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(EXAMPLE), "--folder", str(folder)),
            *("--steps", str(STEPS), "--save-every", "2", *more),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    losses = {int(step): float(loss) for step, loss in LOSS.findall(done.stdout)}
    return done.returncode, losses, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.req("U-07", "X-04", "X-24")
def test_training_goes_on_where_a_killed_save_left_it_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """The loss curve is that of an unbroken run: to the bit on as many ranks."""
    _, unbroken, _ = torchrun(2, tmp_path / "unbroken")
    broken = tmp_path / "broken"

    status, before, text = torchrun(2, broken, "--die-in-save", str(BROKEN_AT))

    assert status != 0, text
    assert list(unbroken) == list(range(1, STEPS + 1))
    assert before == {step: unbroken[step] for step in range(1, BROKEN_AT + 1)}
    assert (broken / "latest").read_text().strip() == "step-000002"
    assert verify(broken / "step-000002")
    assert not (broken / f"step-{BROKEN_AT:06d}").exists()
    for ranks in (1, 2, 3, 4):
        copy = tmp_path / f"on-{ranks}"
        shutil.copytree(broken, copy)

        status, after, text = torchrun(ranks, copy)

        assert status == 0, text
        assert f"resumed after step 2 on {ranks} ranks" in text
        assert list(after) == list(range(3, STEPS + 1))
        expected = {step: unbroken[step] for step in after}
        tolerance = 0.0 if ranks == 2 else 1e-6
        assert after == pytest.approx(expected, rel=tolerance, abs=0.0)
        assert verify(copy / f"step-{STEPS:06d}")
