"""Versions that no test ran on are named, and stop no program."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.features import versions
from tests.support.world import single_rank_group


def test_other_versions_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line at the first ``fully_shard``, and none on versions that were tested."""
    versions.tell_untested.cache_clear()
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    with caplog.at_level(logging.WARNING), single_rank_group():
        monkeypatch.setattr(torch, "__version__", "2.13.1+cpu")
        fully_shard(nn.Linear(2, 2))
        assert not caplog.messages

        versions.tell_untested.cache_clear()
        monkeypatch.setattr(torch, "__version__", "2.15.0a0+git")
        for _ in range(2):
            fully_shard(nn.Linear(2, 2))

    assert caplog.messages == [
        "composable_fsdp was not tested on torch 2.15.0a0+git (tested: 2.11 to 2.13)."
    ]
