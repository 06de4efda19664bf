"""Full parameters of a single unit while a block runs outside the step.

The block sees new parameters over new buffers, in the parameters' dtype; the unit stays
sharded underneath. Nothing frees this memory under a tensor that the block keeps, and
parameters that it keeps show this rank's rows afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_flat_values, spread_flat_values
from composable_fsdp.access.unsharded_grads import UnshardedGrads, unshard_grads
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import part_guards, residency
from composable_fsdp.flat.build_region import full_leaves, full_views
from composable_fsdp.flat.gradients import shard_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import place_path
from composable_fsdp.flat.residency import version_of
from composable_fsdp.flat.step_counts import written
from composable_fsdp.flat.user_memory import is_at, write_to_user_memory
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase, illegal_move
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.runtime.unshard import reshard
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _FSDPState

UNSHARDED: set[int] = set()
"""Identities of the handles whose full parameters a block shows now."""


class UnshardedUnit:
    """The full parameters that a block shows on this rank for a unit.

    With ``rank0_only`` all ranks but the first show sharded parameters; ``fulls`` and
    ``leaves`` are then empty.
    """

    __slots__ = ("fulls", "grads", "handle", "is_agreed", "leaves", "versions")

    def __init__(self, handle: FlatParamHandle) -> None:
        self.handle = handle
        self.fulls: list[Tensor] = []
        """Per region ``(padded_numel,)``; empty if only another rank shows full
        parameters.
        """
        self.leaves: list[nn.Parameter] = []
        """The full parameters in the modules, in the order of the sharded
        parameters.
        """
        self.grads: UnshardedGrads | None = None
        self.is_agreed = True
        """Whether writes of the block may be kept: no rank of the unit raised."""
        self.versions: tuple[int, ...] = ()
        """Version counters of ``leaves`` at the start of the block; empty with
        ``rank0_only``.
        """

    def count_writes(self) -> None:
        """Increment the version counters of sharded parameters that the block wrote to.

        With ``rank0_only`` the other ranks cannot detect writes, and no counter
        changes.
        """
        now = tuple(map(version_of, self.leaves))
        if now != self.versions and self.versions:
            handle, before = self.handle, written(self.handle.layout)
            # A backward of a forward from before the block then raises, as in plain
            # torch.
            torch.autograd.graph.increment_version(
                [
                    leaf
                    for leaf, version, earlier in zip(
                        handle.leaves, now, self.versions, strict=True
                    )
                    if version != earlier
                ]
            )
            # ``ShardWrites.at_build`` detects initialization of bare shards (torch's
            # init functions on sharded parameters). The block wrote full values, which
            # is legal: move the mark along.
            if handle.writes.at_build == before:
                handle.writes.at_build = written(handle.layout)

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Copy parameters that the block assigned into the full buffers.

        ``parameter.data = values`` counts, too: the parameter object stays, its memory
        changes.

        Raises: PhaseError, naming a parameter whose new tensor has another shape or
            dtype.
        """
        handle = self.handle
        place = {id(leaf): i for i, leaf in enumerate(handle.leaves)}
        homes = self._homes()
        for at, (parameters, name, sharded, _) in enumerate(handle.swaps):
            expected: nn.Parameter = sharded
            home: Tensor = sharded
            if self.leaves:
                index = place[id(sharded)]
                expected, home = self.leaves[index], homes[index]
            shown = parameters.get(name)
            # Of a DTensor the plain tensor inside, which must be a view of ``full``.
            found = local_of(shown) if isinstance(shown, Tensor) else shown
            if shown is expected and found is not None and is_at(found, home):
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
                    f"{quoted(place_path(handle, at))} was replaced by "
                    f"{got}; "
                    f"expected {tuple(home.shape)} {home.dtype}. Write into it "
                    "in place, for example parameter.data.copy_(values)."
                )
            # Cloned, because the assigned tensor may be another view of the full
            # buffer.
            home.copy_(found.clone())
            parameters[name] = expected

    def show_shards(self) -> None:
        """Make the parameters of the block, which a user may keep, show the shards."""
        if not self.leaves:
            return
        homes = [
            home
            for region in self.handle.layout.regions
            for home in shard_views(region.cuts, region.shard)[0]
        ]
        for parameter, home in zip(self.leaves, homes, strict=True):
            # A DTensor keeps its values, because the shard is no DTensor.
            if not is_dtensor(parameter):
                parameter.data = home

    def _homes(self) -> list[Tensor]:
        """Return the views of the full buffers that ``leaves`` must use as data."""
        return [
            view
            for region, full in zip(
                self.handle.layout.regions, self.fulls, strict=False
            )
            for view in full_views(region.layout, full)[0]
        ]


def _begin_block(handle: FlatParamHandle) -> None:
    """Note that a block shows the unit. Raises: PhaseError, if the unit is in use."""
    if handle.phase is Phase.SUMMON:
        raise PhaseError(
            f"Fully sharded module {handle.name} is shown by another block of "
            "unshard_params; its end would take the parameters from both. Use one."
        )
    if Phase.SUMMON not in handle.phase.followers:
        raise illegal_move(handle.name, handle.phase, Phase.SUMMON)
    handle.phase = Phase.SUMMON
    UNSHARDED.add(id(handle))


@contextmanager
def _unshard_state(
    state: _FSDPState,
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[UnshardedUnit]:
    """Show full parameters of a single unit.

    Collective: an all-gather, or per region a gather (and on exit a scatter); see
        ``unshard_params``. None without a shard group.
    Raises: PhaseError, if another block shows the unit.
    """
    context, handle = ensure_root(state), state.handle
    _begin_block(handle)
    # The optimizer wrote the shards on the caller's stream.
    context.streams.wait_for_caller()
    unit = UnshardedUnit(handle)
    try:
        _show_copies(unit, rank0_only=rank0_only, to_cpu=offload_to_cpu)
        if not rank0_only:
            unit.versions = tuple(map(version_of, unit.leaves))
        if with_grads:
            unit.grads = unshard_grads(
                handle, unit.leaves, rank0_only=rank0_only, to_cpu=offload_to_cpu
            )
        yield unit
        if writeback and unit.is_agreed:
            # For callers that use this context manager without ``_unshard_states``.
            unit.take_assigned()
            shards = [region.shard for region in handle.layout.regions]
            spread_flat_values(handle, shards, unit.fulls, from_first=rank0_only)
            write_to_user_memory(handle)
            unit.count_writes()
            if unit.grads is not None:
                unit.grads.write_back()
    finally:
        # Also after an exception, so that the unit is sharded and can run again.
        handle.phase = Phase.IDLE
        UNSHARDED.discard(id(handle))
        if unit.grads is not None:
            unit.grads.hide()
        reshard(context, handle)
        unit.show_shards()


def _show_copies(unit: UnshardedUnit, *, rank0_only: bool, to_cpu: bool) -> None:
    """Gather into new buffers of the parameter dtype; show new leaves over them."""
    handle = unit.handle
    home = torch.device("cpu") if to_cpu else handle.layout.device
    shards = [region.shard.to(handle.layout.device) for region in handle.layout.regions]
    fulls = gather_flat_values(handle, shards, first_only=rank0_only)
    if handle.layout.regions and not fulls:
        return
    # Tensors made in inference mode could not be written to outside of that mode.
    with torch.inference_mode(False), torch.no_grad():
        alone = handle.groups.shard is None
        # Without a shard group ``gather_flat_values`` returns the shard itself, to
        # which the block must not write before its end: copy.
        unit.fulls = [full.to(home, copy=alone) for full in fulls]
        unit.leaves = _block_leaves(handle, unit.fulls)
    made = {id(leaf): new for leaf, new in zip(handle.leaves, unit.leaves, strict=True)}
    for parameters, name, sharded, _ in handle.swaps:
        parameters[name] = made[id(sharded)]
    # Modules inside the unit may be called on full parameters.
    part_guards.allow_part_calls(handle)
    residency.show_copies(handle)


def _block_leaves(handle: FlatParamHandle, fulls: list[Tensor]) -> list[nn.Parameter]:
    """Return full parameters over ``fulls``: in each block the same objects."""
    pieces = [
        full_views(region.layout, full)[0]
        for region, full in zip(handle.layout.regions, fulls, strict=True)
    ]
    if not handle.block_leaves:
        for region, parts in zip(handle.layout.regions, pieces, strict=True):
            handle.block_leaves += full_leaves(
                region.layout,
                parts,
                region.leaves,
                handle.layout.forms,
                [leaf.requires_grad for leaf in region.leaves],
            )
    for leaf, piece, own in zip(
        handle.block_leaves, chain(*pieces), handle.leaves, strict=True
    ):
        local_of(leaf).data = piece
        leaf.requires_grad = own.requires_grad
    return handle.block_leaves
