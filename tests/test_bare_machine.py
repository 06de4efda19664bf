"""Tests are collected where plugins or Hypothesis are missing, as ``make test-gpu`` is.

A GPU machine brings its own torch and pytest; nothing is installed on it for us.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COLLECT = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None  # as if it were not installed
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
MARKED = ["tests/runtime/test_compile.py"]
LAWS = "property_tests/test_gpu_laws.py"


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


@pytest.mark.full_matrix("the next test collects the whole repository without plugins")
@pytest.mark.slow
def test_tests_are_collected_without_plugins() -> None:
    """With Hypothesis: files that ask pytest-timeout for more time, and GPU laws."""
    found = collect("--full-matrix", *MARKED, "tests/gpu", LAWS)

    for file in (*MARKED, "tests/gpu/test_nccl.py", LAWS):
        assert any(line.startswith(file) for line in found), file
    for law in ("handle_order", "training_equals"):
        assert any(line.startswith(LAWS) and law in line for line in found), law


@pytest.mark.slow
def test_without_hypothesis_the_gpu_tests_alone_are_collected() -> None:
    """The whole repository is asked for, as ``make test-gpu`` does it."""
    found = collect("-m", "gpu", missing="hypothesis numpy transformers")

    assert found
    assert {line.rpartition("/")[0] for line in found} == {"tests/gpu"}
