"""Prepare the values of a unit's parameters and buffers just before sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name, quoted, strip_wrapper
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.planning.planner import Target
from composable_fsdp.planning.walk import named
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
from composable_fsdp.runtime.meta_values import mark_meta_buffers, watch_shards
from composable_fsdp.tree.state import _FSDPState


class PreparedValues(NamedTuple):
    """How the units of a call get their values."""

    before: Callable[[int], None]
    """Called with the index of each target, just before the unit is sharded."""
    awaiting: tuple[int, ...]
    """Indices of the targets whose modules hold a buffer on meta."""
    stays_on_meta: bool

    def built(self, states: Sequence[_FSDPState]) -> None:
        """Watch for values, if the units have none yet."""
        for state in states if self.stays_on_meta else ():
            watch_shards(state.handle)


def prepare_values(
    targets: Sequence[Target],
    *,
    init: Init | None,
    sync: bool,
    ranks: RankLayout,
    device: torch.device,
    ignored: frozenset[int],
    on_meta: bool,
) -> PreparedValues:
    """Return what gives units their values; ``on_meta``: any parameter has none yet.

    Collective: none. The returned function: with ``sync`` a broadcast per parameter and
        buffer of the unit over the shard (and replicate) group.
    Raises: PlanError, for a unit that is on meta in part, or a module on meta that
        has no ``reset_parameters``.
    """
    # Without an initializer the shards of a model on meta stay on meta until to_empty
    # or a state dict gives them values.
    stays_on_meta = on_meta and init is None and not sync
    if stays_on_meta:
        _refuse_mixed_meta(targets)
    waiting: list[list[MetaModule]] = [[] for _ in targets]
    if init is not None or sync:
        waiting = find_meta_modules(targets, ignored)
        # Found for all units before the first unit changes, so that a missing
        # reset_parameters is refused with the model unchanged.
        init = _choose(init, waiting, device, is_first=not sync or _is_first(ranks))
    # A buffer that several units share is moved and broadcast once.
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
                # Through .data, because other modules may hold the same buffer object.
                buffer.data = buffer.to(device)
        # After initialization, so that rank 0's initial values are sent, too.
        if sync:
            parameters = [p for region in targets[index].parameters for p in region]
            _broadcast([*parameters, *buffers], ranks, device)

    # Read before ``before`` runs the initializer.
    awaiting = _with_meta_buffers(targets) if on_meta else ()
    if stays_on_meta:
        for target in targets:
            mark_meta_buffers(target.members)
    return PreparedValues(before, awaiting, stays_on_meta)


def own_forms(targets: Sequence[Target]) -> dict[str, str]:
    """Return dtype and shape of this rank's parameters and buffers, by name."""
    names = {id(m): name for top in targets[0].modules for name, m in named(top)}
    forms: dict[str, str] = {}
    for target in targets:
        own = {id(p) for region in target.parameters for p in region}
        for module in target.members:
            found = [(k, p) for k, p in module._parameters.items() if id(p) in own]
            for key, tensor in (*found, *module._buffers.items()):
                if tensor is not None:
                    part = local_of(tensor)
                    name = strip_wrapper(join_name(names[id(module)], key))
                    forms[name] = f"{part.dtype} of shape {tuple(part.shape)}"
    return forms


def _is_first(ranks: RankLayout) -> bool:
    """Return whether this rank's values are the source of the broadcasts."""
    groups = (ranks.shard, ranks.replicate)
    return all(group is None or group.rank() == 0 for group in groups)


def _choose(
    init: Init | None,
    waiting: Sequence[Sequence[MetaModule]],
    device: torch.device,
    *,
    is_first: bool,
) -> Init:
    """Return the initializer that this rank runs, with memory allocation included."""
    # A param_init_fn of the caller allocates the memory itself, on every rank.
    if init is not None and init is not reset_parameters:
        return init
    # The broadcast overwrites the values on every other rank: allocate, but do not
    # spend time on an initializer there.
    if not is_first:
        return with_memory(keep_uninitialized, device)
    # Checked before any module is initialized.
    require_reset_parameters([each for unit in waiting for each in unit])
    return with_memory(reset_parameters, device)


def _broadcast(
    tensors: Sequence[Tensor], ranks: RankLayout, device: torch.device
) -> None:
    """Broadcast each tensor from the first rank of the shard and replicate groups."""
    for tensor in map(local_of, tensors):
        # Collectives require dense memory on the device of the group's backend.
        data = tensor.detach().to(device).contiguous()
        # First within the shard group, then over the replicate group: all ranks end
        # with the values of the rank that is first in both groups.
        for group in (ranks.shard, ranks.replicate):
            if group is not None and group.size() > 1:
                collectives.broadcast(data, group)
        # Copy back only if ``data`` is a copy on another device or with other strides.
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)


def _with_meta_buffers(targets: Sequence[Target]) -> tuple[int, ...]:
    """Return the indices of the targets whose modules hold a buffer on meta."""
    return tuple(
        index
        for index, target in enumerate(targets)
        if any(
            buffer is not None and buffer.is_meta
            for module in target.members
            for buffer in module._buffers.values()
        )
    )


def _refuse_mixed_meta(targets: Sequence[Target]) -> None:
    """Raise PlanError for a region with parameters on meta beside ones with values."""
    for target in targets:
        for layout, parameters in zip(
            target.plan.regions, target.parameters, strict=True
        ):
            meta = [
                s.fqn
                for s, p in zip(layout.parameters, parameters, strict=True)
                if p.is_meta
            ]
            if meta and len(meta) < len(parameters):
                raise PlanError(
                    f"Unit {quoted(target.plan.fqn)} has parameters on meta "
                    f"({', '.join(meta)}) beside parameters with values. Give all of "
                    "them values, or none, or pass param_init_fn."
                )
