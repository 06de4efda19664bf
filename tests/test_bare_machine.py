"""Tests are collected where plugins or Hypothesis are missing, as ``make test-gpu`` is.

A GPU machine brings its own torch and pytest; nothing is installed on it for us.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pool import BACKEND_VARIABLE, backend

ROOT = Path(__file__).parents[1]

COLLECT = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None  # as if it were not installed
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def collect(*arguments: str, missing: str = "") -> list[str]:
    """What a pytest without plugins collects of the repository, without ``missing``."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, missing, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_without_hypothesis_the_gpu_tests_alone_are_collected() -> None:
    """The whole repository is asked for, as ``make test-gpu`` does it."""
    found = collect("-m", "gpu", missing="hypothesis numpy transformers")

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
