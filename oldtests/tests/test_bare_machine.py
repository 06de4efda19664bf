"""Tests are collected where plugins or Hypothesis are missing, as ``make test-gpu`` is.

A GPU machine brings its own torch and pytest; nothing is installed on it for us.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pool import BACKEND_VARIABLE, backend
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[1]

COLLECT = f"""
import os, sys
os.chdir({str(ROOT)!r})
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
os.environ.pop("PYTEST_ADDOPTS", None)
for name in ("hypothesis", "numpy", "transformers"):
    for each in [n for n in sys.modules if n.partition(".")[0] == name]:
        del sys.modules[each]
    sys.modules[name] = None  # as if it were not installed
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]))
"""


@pytest.mark.slow
def test_without_hypothesis_the_gpu_tests_alone_are_collected(tmp_path: Path) -> None:
    """The whole repository is asked for, as ``make test-gpu`` does it."""
    (tmp_path / "collect.py").write_text(COLLECT)
    status, output = run_script("collect.py", ranks=1, folder=tmp_path)

    assert status == 0, output
    found = [line for line in output.splitlines() if "::" in line]
    assert found
    assert {line.rpartition("/")[0] for line in found} == {"tests/gpu"}


@pytest.mark.req("S2-07")
def test_the_backend_of_ranks_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo, unless a variable says NCCL."""
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    assert backend() == "gloo"
    monkeypatch.setenv(BACKEND_VARIABLE, "nccl")
    assert backend() == "nccl"
