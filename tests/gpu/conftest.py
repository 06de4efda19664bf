"""Ranks on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.world import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks on NCCL, one per GPU, at most two; some modules have their own numbers."""
    with RankPool(min(torch.cuda.device_count(), 2), "nccl") as ranks:
        yield ranks
