"""The watcher of streams sees what is not ordered, and passes what is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.streams import FakeEvent, FakeStream, stream_order


def two_streams(*, wait: bool) -> tuple[list[str], Tensor]:
    """Write on one stream, read on another that waits or does not."""
    with stream_order() as order:
        event, x = FakeEvent(), torch.zeros(4)
        x.add_(1)
        event.record(order.compute)
        side = FakeStream(order, "side")
        if wait:
            side.wait_event(event)
        with order.on(side):
            y = x * 2
    return order.problems, y


def test_a_read_behind_the_write_is_fine() -> None:
    """An event carries the order from stream to stream."""
    problems, _ = two_streams(wait=True)

    assert problems == []


def test_a_read_beside_the_write_is_reported() -> None:
    """Both places are named."""
    problems, _ = two_streams(wait=False)

    assert problems == ["side reads in the model what compute writes in the model"]


@pytest.mark.parametrize("wait", [True, False])
def test_memory_must_not_be_reused_before_its_last_reader(wait: bool) -> None:
    """What one stream frees while another reads may go to the next allocation."""
    with stream_order() as order:
        x = torch.zeros(4)
        side = FakeStream(order, "side")
        side.wait_stream(order.compute)
        with order.on(side):
            y = x * 2
        del x
        if wait:
            order.compute.wait_stream(side)
        torch.zeros(4)

    assert bool(order.problems) is not wait
    assert y.sum() == 0


def test_parts_of_one_buffer_may_be_written_side_by_side() -> None:
    """Bytes count, not tensors."""
    with stream_order() as order:
        x = torch.zeros(4)
        side = FakeStream(order, "side")
        side.wait_stream(order.compute)
        x[:2].add_(1)
        with order.on(side):
            x[2:].add_(1)

    assert order.problems == []


def test_an_event_that_nobody_recorded_is_reported() -> None:
    """Waiting for it orders nothing."""
    with stream_order() as order:
        order.compute.wait_event(FakeEvent())

    assert order.problems == ["compute waits for an event that was never recorded"]
