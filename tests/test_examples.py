"""Each example runs with a few steps; ``make examples`` runs them in full."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import run_all  # noqa: E402  # from the folder of the examples

ELSEWHERE = {"elastic_resume.py"}
"""Of which ``tests/faults/test_deaths.py`` runs more than this."""
NAMES = [each.path.name for each in run_all.examples()]
EVERYDAY = "meta_init.py"
"""The others run with ``--full-matrix``, and all of them by ``make examples``."""


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted({*NAMES} - ELSEWHERE - {EVERYDAY}), EVERYDAY])
def test_an_example_runs_on_two_ranks(tmp_path: Path, name: str) -> None:
    """With the arguments that its comment has for a quick run."""
    (example,) = (each for each in run_all.examples() if each.path.name == name)
    if example.missing:
        pytest.skip(f"needs {', '.join(example.missing)}")
    # A program that starts ranks itself has an option for what a rank does.
    own = ["--worker"] if example.launch == "python" else []

    status, output = run_script(
        str(example.path), *own, *example.quick, ranks=2, folder=tmp_path
    )

    assert status == 0, output


def test_every_example_says_how_to_run_it() -> None:
    """Each program of the folder has the comments, and a section in the README."""
    programs = [
        path.name
        for path in sorted((ROOT / "examples").glob("*.py"))
        if "__main__" in path.read_text() and path.name != "run_all.py"
    ]
    page = (ROOT / "examples" / "README.md").read_text()

    assert programs == NAMES
    assert [name for name in programs if f"## `{name}`" not in page] == []
    assert all(each.quick and each.arguments for each in run_all.examples())
