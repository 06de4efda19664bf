"""The notebooks run from top to bottom, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_script

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


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
    (tmp_path / "cells.py").write_text(text)

    status, output = run_script("cells.py", ranks=1, folder=tmp_path)

    assert status == 0, output
    assert not any(cell["outputs"] for cell in cells)
