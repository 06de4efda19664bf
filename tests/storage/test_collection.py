"""Claims on the garbage collector during a save and a load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch import nn

from composable_fsdp import CheckpointError, load, save
from composable_fsdp.storage.collection import paused_collection
from composable_fsdp.storage.native import NativeSource


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collector(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The collector is on, or was switched off by the user."""
    was_on = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was_on else gc.disable)()


@pytest.mark.req("K-05")
def test_the_collector_waits_and_is_as_before_afterwards(
    tmp_path: Path, collector: bool
) -> None:
    """Also after a load that raised."""
    model = nn.Linear(2, 2)
    seen: list[bool] = []
    real = NativeSource.prepare

    def noted(self: NativeSource, *args: object) -> None:
        seen.append(gc.isenabled())
        real(self, *args)  # type: ignore[arg-type]

    save(tmp_path / "run", model)
    assert gc.isenabled() is collector
    with mock.patch.object(NativeSource, "prepare", noted):
        load(tmp_path / "run", model)
    assert seen == [False]
    assert gc.isenabled() is collector
    with pytest.raises(CheckpointError):
        load(tmp_path / "run", nn.Linear(3, 2))
    assert gc.isenabled() is collector


def test_blocks_of_two_threads_may_overlap() -> None:
    """The collector is on after both."""
    assert gc.isenabled()
    first, second = paused_collection(), paused_collection()
    with first:
        second.__enter__()
    second.__exit__(None, None, None)

    assert gc.isenabled()
