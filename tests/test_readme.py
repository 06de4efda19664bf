"""The README's example does what it says, as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from composable_fsdp import verify
from tests.support.scripts import run_script

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_example_in_twenty_lines_runs_on_two_ranks(tmp_path: Path) -> None:
    """Twenty lines print a plan and each rank's shape, and leave a checkpoint."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "twenty_lines.py"
    script.write_text(example)

    status, output = run_script(str(script), ranks=2, folder=tmp_path)

    assert status == 0, output
    assert len([line for line in example.splitlines() if line.strip()]) == 20
    assert "torch.Size([33, 64])" in output
    assert "torch.Size([31, 64])" in output
    assert verify(tmp_path / "runs")
