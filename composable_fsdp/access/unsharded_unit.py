"""Full parameters of one unit while a block runs outside the step.

Usually the unit's own ``full`` and its leaves are shown, as in forward. They are not
what is asked for in host memory, nor in full precision where compute has another dtype:
then leaves over buffers of their own are, and the unit stays sharded underneath.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_flat_values, spread_flat_values
from composable_fsdp.access.unsharded_grads import UnshardedGrads, unshard_grads
from composable_fsdp.comm import collectives
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import part_guards, views
from composable_fsdp.flat.build import written
from composable_fsdp.flat.external_changes import is_at, restore_full_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import full_leaf, full_views
from composable_fsdp.flat.versions import version_of
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.unshard import reshard, unshard, wait_unsharded
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

UNSHARDED: set[int] = set()
"""Identities of the handles whose full parameters a block shows."""


class UnshardedUnit:
    """What a block shows of one unit on this rank: all of it, or its shards still."""

    __slots__ = ("fulls", "grads", "handle", "is_agreed", "leaves", "versions")

    def __init__(self, handle: FlatParamHandle) -> None:
        self.handle = handle
        self.fulls: list[Tensor] = []
        """Per region ``(padded_numel,)``; none if only another rank shows them."""
        self.leaves: list[nn.Parameter] = []
        """What takes the place of the sharded leaves, in the same order."""
        self.grads: UnshardedGrads | None = None
        self.is_agreed = True
        """Whether what the block wrote may be kept: no rank of the unit raised."""
        self.versions: tuple[int, ...] = ()
        """Of ``leaves``, as the block began; empty if not all ranks show them."""

    def count_writes(self) -> None:
        """Move the versions of sharded leaves that the block wrote to.

        So a backward through a forward from before the block is refused, as in plain
        torch. With ``rank0_only`` the other ranks cannot know, and none is moved.
        """
        now = tuple(map(version_of, self.leaves))
        if now != self.versions and self.versions:
            handle, before = self.handle, written(self.handle)
            torch.autograd.graph.increment_version(
                [
                    leaf
                    for leaf, version, earlier in zip(
                        handle.leaves, now, self.versions, strict=True
                    )
                    if version != earlier
                ]
            )
            if handle.written_at_build == before:
                # Whole values, of which each rank has its own part: nobody drew them
                # for a shard.
                handle.written_at_build = written(handle)

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Take up parameters that the block assigned, or refuse them by name.

        ``parameter.data = values`` counts, too: the parameter stays, its memory does
        not.

        Raises: PhaseError, for one of another shape or dtype.
        """
        handle = self.handle
        place = {id(leaf): i for i, leaf in enumerate(handle.leaves)}
        homes = self._homes()
        for info, (parameters, name, sharded, _) in zip(
            handle.infos, handle.swaps, strict=True
        ):
            expected: nn.Parameter = sharded
            home: Tensor = sharded
            if self.leaves:
                index = place[id(sharded)]
                expected, home = self.leaves[index], homes[index]
            found = parameters.get(name)
            if found is expected and is_at(found, home):
                continue
            if (
                not isinstance(found, Tensor)
                or found.shape != home.shape
                or found.dtype != home.dtype
            ):
                got = (
                    f"{tuple(found.shape)} {found.dtype}"
                    if isinstance(found, Tensor)
                    else type(found).__name__
                )
                raise PhaseError(
                    f"Inside unshard_params parameter "
                    f"{quoted(join_name(handle.full_fqn, info.fqn))} was replaced by "
                    f"{got}; "
                    f"expected {tuple(home.shape)} {home.dtype}. Write into it "
                    "in place, for example parameter.data.copy_(values)."
                )
            # A clone: what was found may be another view of the same memory.
            home.copy_(found.clone())
            parameters[name] = expected

    def _homes(self) -> list[Tensor]:
        """Views of the full buffers where the data of ``leaves`` has to be."""
        return [
            view
            for region, full in zip(self.handle.regions, self.fulls, strict=False)
            for view in full_views(region.layout, full)[0]
        ]


@contextmanager
def _unshard_state(
    state: _FSDPState,
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[UnshardedUnit]:
    """Full parameters of one unit.

    Collective: one all-gather, or one gather (and scatter) per region; see
    ``unshard_params``. None if the unit's shard group has one rank.
    """
    context, handle = ensure_root(state), state.handle
    if handle.phase is Phase.SUMMON:
        raise PhaseError(
            f"Fully sharded module {handle.name} is shown by another block of "
            "unshard_params; its end would take the parameters from both. Use one."
        )
    handle.phase = Phase.SUMMON
    UNSHARDED.add(id(handle))
    if context.streams is not None:
        # The optimizer wrote the shards on the caller's stream.
        context.streams.gather.wait_stream(torch.cuda.current_stream(state.device))
    apart = offload_to_cpu or any(_casts(handle))
    uncut = [] if apart else [r.shard for r in handle.regions if not r.is_cut]
    kept = [(shard, shard.clone()) for shard in uncut]
    unit, written = UnshardedUnit(handle), False
    try:
        if apart:
            _show_copies(unit, rank0_only=rank0_only, to_cpu=offload_to_cpu)
        else:
            _show_unit_buffer(unit, context, rank0_only=rank0_only)
        if not rank0_only:
            unit.versions = tuple(map(version_of, unit.leaves))
        if with_grads:
            unit.grads = unshard_grads(
                handle, unit.leaves, rank0_only=rank0_only, to_cpu=offload_to_cpu
            )
        yield unit
        if writeback and unit.is_agreed:
            unit.take_assigned()
            shards = [region.shard for region in handle.regions]
            spread_flat_values(handle, shards, unit.fulls, from_first=rank0_only)
            unit.count_writes()
            written = True
            if unit.grads is not None:
                unit.grads.write_back()
    finally:
        handle.phase = Phase.IDLE
        UNSHARDED.discard(id(handle))
        if unit.grads is not None:
            unit.grads.hide()
        if unit.leaves and not apart:
            restore_full_views(handle)
        reshard(context, handle)
        if not written:
            # Where nothing is cut, the block wrote into the shard itself.
            for shard, values in kept:
                shard.copy_(values)


def _casts(handle: FlatParamHandle) -> Iterator[bool]:
    return (region.full.dtype != region.shard.dtype for region in handle.regions)


def _show_unit_buffer(
    unit: UnshardedUnit, context: RuntimeContext, *, rank0_only: bool
) -> None:
    """Gather into the unit's own ``full`` and show its leaves."""
    handle = unit.handle
    if rank0_only and handle.groups.shard is not None:
        _gather_to_first(handle)
        if handle.groups.rank != 0:
            return
    else:
        unshard(context, handle)
    wait_unsharded(handle)
    unit.fulls = [region.full for region in handle.regions]
    unit.leaves = [leaf for region in handle.regions for leaf in region.full_leaves]


def _gather_to_first(handle: FlatParamHandle) -> None:
    """Fill ``full`` on the first rank of the shard group; others allocate nothing."""
    group = handle.groups.shard
    assert group is not None
    first = handle.groups.rank == 0
    if first:
        views.allocate_full(handle)
    for region in handle.regions:
        if region.is_cut and region.layout.padded_numel:
            full = region.full if first else None
            collectives.gather_flat(full, region.shard.to(handle.device), group)


def _show_copies(unit: UnshardedUnit, *, rank0_only: bool, to_cpu: bool) -> None:
    """Gather into new buffers, in the parameters' dtype, and show leaves over them."""
    handle = unit.handle
    home = torch.device("cpu") if to_cpu else handle.device
    shards = [region.shard.to(handle.device) for region in handle.regions]
    fulls = gather_flat_values(handle, shards, first_only=rank0_only)
    if handle.regions and not fulls:
        return
    with torch.inference_mode(False), torch.no_grad():
        # One rank alone has gathered nothing: its shard is what must not be shown.
        alone = handle.groups.shard is None
        unit.fulls = [full.to(home, copy=alone) for full in fulls]
        for region, full in zip(handle.regions, unit.fulls, strict=True):
            pieces, _ = full_views(region.layout, full)
            unit.leaves.extend(
                full_leaf(piece, leaf, trainable=leaf.requires_grad)
                for piece, leaf in zip(pieces, region.leaves, strict=True)
            )
    made = {id(leaf): new for leaf, new in zip(handle.leaves, unit.leaves, strict=True)}
    for parameters, name, sharded, _ in handle.swaps:
        parameters[name] = made[id(sharded)]
    part_guards.allow_part_calls(handle)
    handle.is_full = True
