"""Ranks on GPUs, and the GPU of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.counts import RUNNABLE
from tests.support.world import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(min(torch.cuda.device_count(), 2), "nccl") as ranks:
        yield ranks


@pytest.fixture(scope="module", params=RUNNABLE)
def every_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, "nccl") as ranks:
        yield ranks


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
