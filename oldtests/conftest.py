"""What both test folders share: ranks, worlds of one process, Hypothesis profiles.

On a machine that brings only torch, safetensors and pytest (``python -m pytest -m
gpu``, nothing installed) just the GPU tests are collected.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.support import world as worlds
from tests.support.matrix import mixed, thin

# Read by pytest-timeout where it is installed; an option of its own would be an error
# where it is not.
os.environ.setdefault("PYTEST_TIMEOUT", "120")
# Tests give groups short timeouts, half of which would be reported as a hang. Ranks
# inherit the variable.
os.environ.setdefault("COMPOSABLE_FSDP_HANG_AFTER", "0")
# Without these, glibc gives freed memory back to the kernel all the time, and the page
# faults that follow are half of the time of ranks. Read by processes started from here
# on: pytest's workers, and the fork server of the ranks.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(64 << 20))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(512 << 20))

collect_ignore_glob: list[str] = []
if find_spec("hypothesis") is not None:
    from tests.support.strategies import register_profiles

    register_profiles()
else:
    collect_ignore_glob = ["property_tests/*", "tests/[!g]*"]

FRAMEWORKS = ("lightning", "accelerate", "peft")
"""What the tests in tests/integrations_env need, beside the development environment."""
ABSENT_FRAMEWORKS = [each for each in FRAMEWORKS if find_spec(each) is None]
if ABSENT_FRAMEWORKS:
    collect_ignore_glob.append("tests/integrations_env/*")


def pytest_report_header() -> list[str]:
    """Say aloud what this environment leaves out."""
    told = []
    if find_spec("hypothesis") is None:
        told.append("hypothesis is not installed: only tests/gpu is collected")
    elif ABSENT_FRAMEWORKS:
        absent = ", ".join(ABSENT_FRAMEWORKS)
        told.append(
            f"not installed: {absent}; tests/integrations_env is left out "
            "(make test-integrations runs it)"
        )
    return told


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that runs every combination."""
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="run every combination of parameters, not one for each pair of values",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Cut test matrices to pairs of values."""
    if not config.getoption("--full-matrix"):
        chosen, left_out = thin(items)
        items[:] = mixed(chosen, "tests/faults/")
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """What is imported by now lives as long as the run: no collection looks at it."""
    gc.freeze()


@pytest.fixture
def few_objects() -> None:
    """Collections from here on look at no object that earlier tests have left.

    Garbage among these is collected first. A collection of all objects of a whole run
    takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def few_objects_of_other_modules() -> None:
    """The same at the begin of each module, as many tests collect."""
    gc.collect()
    gc.freeze()


# Two threads would change the order of sums, and ranks have one each.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], worlds.RankPool]]:
    """``ranks(2).run(check, ...)``: the long-lived pool of so many ranks."""
    yield worlds.rank_pool
    worlds.shutdown_pools()


@pytest.fixture
def one_rank() -> Iterator[worlds.World]:
    """A real process group of one rank, in the test's own process."""
    with worlds.single_rank_group() as world:
        yield world
