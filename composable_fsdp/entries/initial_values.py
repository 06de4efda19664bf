"""What a unit's parameters and buffers go through just before it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.planning.planner import Target
from composable_fsdp.runtime.materialize import (
    Init,
    MetaModule,
    find_meta_modules,
    keep_uninitialized,
    materialize,
    require_reset_parameters,
    reset_parameters,
    with_memory,
)


def prepare_values(
    targets: Sequence[Target],
    *,
    init: Init | None,
    sync: bool,
    ranks: RankLayout,
    device: torch.device,
    ignored: frozenset[int],
) -> Callable[[int], None] | None:
    """Return what has to be called with each target's index, or None if nothing.

    It runs ``init`` on modules with meta tensors, moves buffers to ``device`` in place,
    and with ``sync`` gives every rank the values of the first. Then ranks that are not
    the first need no initialiser, only memory. ``ignored`` are identities of parameters
    that stay as they are.

    Collective, in what is returned: with ``sync`` one broadcast per parameter and
    buffer of the unit over the shard (and replicate) group; else none.
    Raises: PlanError, for a module on meta that has no ``reset_parameters``.
    """
    if init is None and not sync and device.type == "cpu":
        return None
    waiting: list[list[MetaModule]] = [[] for _ in targets]
    if init is not None or sync:
        waiting = find_meta_modules(targets, ignored)
        init = _choose(init, waiting, device, is_first=not sync or _is_first(ranks))
    done: set[int] = set()

    def before(index: int) -> None:
        for each in waiting[index]:
            assert init is not None
            materialize(each, init)
        buffers = [
            buffer
            for module in targets[index].members
            for buffer in module._buffers.values()
            if buffer is not None and id(buffer) not in done
        ]
        done.update(map(id, buffers))
        for buffer in buffers:
            if buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)
        if sync:
            parameters = [p for region in targets[index].parameters for p in region]
            _broadcast([*parameters, *buffers], ranks, device)

    return before


def _is_first(ranks: RankLayout) -> bool:
    groups = (ranks.shard, ranks.replicate)
    return all(group is None or group.rank() == 0 for group in groups)


def _choose(
    init: Init | None,
    waiting: Sequence[Sequence[MetaModule]],
    device: torch.device,
    *,
    is_first: bool,
) -> Init:
    if init is not None and init is not reset_parameters:
        return init
    if not is_first:
        return with_memory(keep_uninitialized, device)
    require_reset_parameters([each for unit in waiting for each in unit])
    return with_memory(reset_parameters, device)


def _broadcast(
    tensors: Sequence[Tensor], ranks: RankLayout, device: torch.device
) -> None:
    """Give every rank the values of the group's first rank."""
    for tensor in tensors:
        data = tensor.detach().to(device).contiguous()
        for group in (ranks.shard, ranks.replicate):
            if group is not None and group.size() > 1:
                collectives.broadcast(data, group)
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
