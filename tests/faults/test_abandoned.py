"""A collective that this rank waits for no longer writes into nobody's memory.

The backend's thread goes on with the collective, and completes the collective when the
rank that was missing comes after all.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.utils.hooks import RemovableHandle

from composable_fsdp import ShardingStrategy, fully_shard
from composable_fsdp.comm import collectives
from composable_fsdp.errors import DesyncError
from composable_fsdp.features import Arena
from composable_fsdp.runtime.recover import recover
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.sharded import RankCount
from tests.support.short_waits import shorten_waits
from tests.support.world import World

WIDTH = 64
LATE = 2
"""The rank that comes late, with other numbers."""


class Refused(Exception):
    """Raised by a module on a rank."""


def refuse(*_: object) -> None:
    raise Refused


def give_up(world: World, model: nn.Sequential, how: str) -> None:
    """Every rank but the late one waits for block 1 and stops waiting."""
    x, late = torch.ones(2, WIDTH), world.rank == LATE
    block = model[1]
    if how == "interrupt" and not late:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.alarm(1)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        return
    hook: RemovableHandle | None = None
    start: Callable[[], Any] = partial(model, x)
    if how == "reduce":
        hook = block.register_full_backward_pre_hook(refuse) if late else None
        start = model(x).sum().backward
    elif late:
        hook = block.register_forward_pre_hook(refuse, prepend=True)
    if hook is not None:
        with pytest.raises(Refused):
            start()
        hook.remove()
        start = partial(model, x)
    if how != "interrupt":
        with pytest.raises(DesyncError):
            start()


def send_late(world: World, how: str, numel: int) -> None:
    """Take part in the collective of block 1, with sevens."""
    group = world.group
    if how == "reduce":
        group.allreduce([torch.full((numel,), 7.0)], AllreduceOptions()).wait()
        return
    full, shard = torch.empty(numel), torch.full((numel // world.world_size,), 7.0)
    getattr(group, collectives._ALL_GATHER)(full, shard, AllgatherOptions()).wait()


def wait_for(*files: Path) -> None:
    """Wait until the files exist."""
    until = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, files
        time.sleep(0.02)


def abandon(
    world: World, how: str, path: Path, arena: Arena | None
) -> tuple[int, bool, bool]:
    """The number of tensors that changed, and whether the unit and its views are as
    they were; of the late rank, nothing."""
    shorten_waits()
    torch.manual_seed(0)
    strategy = ShardingStrategy["SHARD_GRAD_OP" if how == "reduce" else "FULL_SHARD"]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for block in model:
        fully_shard(block, strategy=strategy, arena=arena)
    fully_shard(model, strategy=strategy, arena=arena)
    for _ in range(4):
        model(torch.ones(2, WIDTH)).sum().backward()
        model.zero_grad()
    (handle,) = _get_fsdp_handles(model[1])
    (region,) = handle.layout.trainable
    numel = region.layout.padded_numel
    buffer = region.reduce.buffer if how == "reduce" else region.full.buffer

    give_up(world, model, how)
    if world.rank == LATE:
        wait_for(path / "0", path / "1")
        send_late(world, how, numel)
        (path / "sent").touch()
        return 0, True, True
    # As the next call does after an interrupt; a forward that raised has done so.
    if how == "interrupt":
        context = region.reduce.owner().context
        recover(context, drop_gradients=False)
    # The unit has another buffer since, which is free; the collective has the old one.
    assert buffer.untyped_storage().nbytes() == buffer.nbytes
    buffer = region.reduce.buffer if how == "reduce" else region.full.buffer
    free = buffer.untyped_storage().nbytes() == 0
    # The allocator hands freed memory of the same size out again.
    filled = [torch.full((numel,), 3.0) for _ in range(64)]
    (path / str(world.rank)).touch()
    wait_for(path / "sent")
    time.sleep(0.5)
    changed = sum(not torch.equal(each, torch.full_like(each, 3.0)) for each in filled)
    views: tuple[Tensor, ...] = (*region.full.leaves,)
    if how == "reduce":
        views = region.reduce.views
    storage = buffer.untyped_storage().data_ptr()
    same = all(each.untyped_storage().data_ptr() == storage for each in views)
    return changed, free, same


@pytest.mark.req("X-06", "X-35")
@pytest.mark.parametrize(
    ("how", "arena"), [("reduce", Arena(poison=True)), ("interrupt", None)]
)
def test_a_late_rank_writes_into_no_memory_that_was_freed(
    ranks: RankCount, tmp_path: Path, how: str, arena: Arena | None
) -> None:
    """After a proof in an all-gather or a reduction, and after Ctrl-C."""
    found = ranks(3).run(abandon, how, tmp_path, arena, timeout=90, retire=True)

    assert found == [(0, True, True)] * 3
