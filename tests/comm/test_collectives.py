"""The two calls of every step with what a model may bring, on live ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.comm.operations import Operation
from tests.support.on_ranks import on_ranks
from tests.support.world import World


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.complex64,),
        (torch.complex64, torch.complex64),
        (torch.complex64, torch.float32),
        (torch.int16,),
        (torch.uint16, torch.uint16),
    ],
    ids=lambda dtypes: "-".join(str(d).removeprefix("torch.") for d in dtypes),
)
@on_ranks(2)
def test_regions_of_every_dtype_are_gathered_and_reduced(
    world: World, dtypes: tuple[torch.dtype, ...]
) -> None:
    """One region or several at once; no backend knows complex numbers.

    Rank *r* sends ``r + 1``: gathered in rank order, and summed.
    """
    size, group = world.world_size, world.group
    shards = [torch.full((2,), world.rank + 1, dtype=dtype) for dtype in dtypes]
    fulls = [torch.zeros(2 * size, dtype=dtype) for dtype in dtypes]
    collectives.all_gather_flat(fulls, shards, group)
    numbers = torch.arange(1, size + 1).repeat_interleave(2)
    for full in fulls:
        assert torch.equal(full, numbers.to(full.dtype))

    # Quantized weights have no gradients, and gloo adds no integers of 16 bits.
    if len(set(dtypes)) == 1 and dtypes[0].itemsize > 2:
        sums = [torch.zeros_like(shard) for shard in shards]
        sent = [s.repeat(size) for s in shards]
        collectives.reduce_scatter_flat(sums, sent, group)
        for total in sums:
            assert torch.equal(total, torch.full_like(total, size * (size + 1) / 2))


@on_ranks(2)
def test_dtypes_that_nccl_does_not_know_are_sent_as_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions of a step, and what is gathered or spread outside."""
    # gloo would take integers of 16 bits, so look at what it gets.
    sent: list[torch.Tensor] = []
    plain = Operation.send

    def send(operation: Any, start: Any, *args: Any, async_op: bool) -> Any:
        tensors = [t for each in args if isinstance(each, list) for t in each]
        sent.extend([*tensors, *(t for t in args if isinstance(t, torch.Tensor))])
        return plain(operation, start, *args, async_op=async_op)

    broadcast = dist.broadcast

    def send_one(tensor: torch.Tensor, **options: Any) -> Any:
        sent.append(tensor)
        return broadcast(tensor, **options)

    monkeypatch.setattr(Operation, "send", send)
    monkeypatch.setattr(dist, "broadcast", send_one)
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        shard = torch.full((2,), world.rank + 1, dtype=dtype)
        for count in (1, 2):
            fulls = [shard.new_empty(2 * world.world_size) for _ in range(count)]
            collectives.all_gather_flat(fulls, [shard] * count, world.group)
            assert all(full.tolist() == [1, 1, 2, 2] for full in fulls)
        value = torch.full((2, 2), world.rank + 1, dtype=dtype)
        collectives.broadcast(value, world.group, rank=1)
        assert value.tolist() == [[2, 2], [2, 2]]
    assert {tensor.dtype for tensor in sent} == {torch.uint8}
