"""The notebooks run from top to bottom, each in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.req("N-08")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Its code cells, in order; stored notebooks have no outputs."""
    cells = [
        c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"
    ]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert not any(cell["outputs"] for cell in cells)
