"""Counting live bytes: what is counted, and for how long."""

from __future__ import annotations

import pytest
import torch

from tests.support.memory import LiveBytes, fake_tensors


def test_bytes_count_while_their_storage_lives() -> None:
    """A new tensor adds its bytes, a dead one takes them away, the peak stays."""
    with LiveBytes() as live:
        first = torch.empty(100, dtype=torch.uint8)
        second = torch.empty(50, dtype=torch.uint8)
        del second

    assert (live.now, live.peak) == (100, 150)
    assert first.numel() == 100


def test_views_of_one_storage_count_once() -> None:
    """Neither a view nor a detached alias has bytes of its own."""
    with LiveBytes() as live:
        whole = torch.empty(64, dtype=torch.uint8)
        parts = [whole[:32], whole.view(8, 8), whole.detach()]

    assert len(parts) == 3
    assert live.now == live.peak == 64


def test_a_tensor_from_before_counts_when_an_op_reads_it() -> None:
    """Inputs of ops are met as well as what ops make."""
    old = torch.zeros(40, dtype=torch.uint8)

    with LiveBytes() as live:
        before = live.now
        new = old + 1

    assert new.numel() == 40
    assert (before, live.now) == (0, 80)


def test_a_storage_that_grows_and_shrinks_between_ops_is_in_the_peak() -> None:
    """``resize_`` is no op of the dispatcher, and is counted all the same."""
    with LiveBytes() as live:
        tensor = torch.empty(16, dtype=torch.uint8)
        tensor.untyped_storage().resize_(1000)
        tensor.untyped_storage().resize_(0)

    assert (live.now, live.peak) == (0, 1000)


def test_a_new_peak_begins_at_what_is_alive() -> None:
    """After ``reset`` earlier peaks are forgotten."""
    with LiveBytes() as live:
        kept = torch.empty(10, dtype=torch.uint8)
        torch.empty(1000, dtype=torch.uint8)
        live.reset()

    assert kept.numel() == live.peak == 10


def test_what_was_observed_at_the_peak_is_kept() -> None:
    """``observe`` is asked at each new peak, and its last answer stays."""
    with LiveBytes() as live:
        live.observe = lambda: live.now
        for size in (3, 9, 5):
            torch.empty(size, dtype=torch.uint8)

    assert (live.peak, live.at_peak) == (9, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_have_sizes_and_no_memory(dtype: torch.dtype) -> None:
    """A terabyte can be counted, and its storage resized."""
    numel = 2**40 // dtype.itemsize

    with fake_tensors(), LiveBytes() as live:
        tensor = torch.empty(numel, dtype=dtype)
        full = live.now
        tensor.untyped_storage().resize_(0)

    assert (full, live.now) == (2**40, 0)
