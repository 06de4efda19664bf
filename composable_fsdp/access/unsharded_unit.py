"""Full parameters of a single unit while a block runs outside the step.

The block sees new parameters over new buffers, in the parameters' dtype; the unit stays
sharded underneath. Nothing frees this memory under a tensor that the block keeps, and
parameters that it keeps show this rank's rows afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_flat_values, spread_flat_values
from composable_fsdp.comm import collectives
from composable_fsdp.errors import DesyncError, PhaseError
from composable_fsdp.flat import memory, part_guards, residency
from composable_fsdp.flat.build_region import full_leaves, full_views
from composable_fsdp.flat.flat_parameter import leaf_gradients, set_leaf_gradient
from composable_fsdp.flat.gradients import shard_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.memory import is_at
from composable_fsdp.flat.param_ref import place_path, slot_path
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.flat.residency import version_of, written
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase, illegal_move
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.runtime.unshard import reshard
from composable_fsdp.tree import moments
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
        """Per region ``(padded_numel,)``."""
        self.leaves: list[nn.Parameter] = []
        """The full parameters, in the order of the sharded parameters."""
        self.grads: UnshardedGrads | None = None
        self.is_agreed = True
        """Whether writes of the block may be kept: no rank of the unit raised."""
        self.versions: tuple[int, ...] = ()
        """Version counters of ``leaves`` before the block; none with ``rank0_only``."""

    def count_writes(self) -> None:
        """Increment the versions of sharded parameters that the block wrote to."""
        now = tuple(map(version_of, self.leaves))
        if now == self.versions or not self.versions:
            return
        handle, before = self.handle, written(self.handle.layout)
        counts = zip(handle.leaves, now, self.versions, strict=True)
        # A backward of a forward from before the block then raises, as in plain torch.
        torch.autograd.graph.increment_version(
            [leaf for leaf, version, earlier in counts if version != earlier]
        )
        # ``at_build`` detects torch's init functions on bare shards. The block wrote
        # full values, which is legal: move the mark along.
        if handle.writes.at_build == before:
            handle.writes.at_build = written(handle.layout)

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Copy parameters that the block assigned into the full buffers.

        Raises: PhaseError, naming a parameter whose new tensor has another shape or
            dtype.
        """
        handle = self.handle
        regions = zip(handle.layout.regions, self.fulls, strict=False)
        homes = [
            v for region, full in regions for v in full_views(region.layout, full)[0]
        ]
        pairs = zip(self.leaves, homes, strict=True) if self.leaves else ()
        places = dict(zip(map(id, handle.leaves), pairs, strict=False))
        for at, (parameters, name, sharded, _) in enumerate(handle.swaps):
            expected, home = places.get(id(sharded), (sharded, sharded))
            shown = parameters.get(name)
            # Of a DTensor the plain tensor inside, which must be a view of ``full``.
            found = local_of(shown) if isinstance(shown, Tensor) else shown
            if shown is expected and found is not None and is_at(found, home):
                continue
            got = type(found).__name__
            if isinstance(found, Tensor):
                got = f"{tuple(found.shape)} {found.dtype}"
            if got != f"{tuple(home.shape)} {home.dtype}":
                raise PhaseError(
                    "Inside unshard_params parameter "
                    f"{quoted(place_path(handle, at))} was replaced by {got}; expected "
                    f"{tuple(home.shape)} {home.dtype}. Write into it in place, for "
                    "example parameter.data.copy_(values)."
                )
            assert found is not None
            # Cloned: the assigned tensor may be another view of the full buffer.
            home.copy_(found.clone())
            parameters[name] = expected

    def show_shards(self) -> None:
        """Make the parameters of the block, which a user may keep, show the shards."""
        regions = self.handle.layout.regions
        views = (shard_views(region.cuts, region.shard)[0] for region in regions)
        for parameter, home in zip(self.leaves, chain(*views), strict=False):
            # A DTensor keeps its values, because the shard is no DTensor.
            if not is_dtensor(parameter):
                parameter.data = home


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

    Collective: see ``unshard_params``; none without a shard group.
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
            unit.grads = UnshardedGrads(handle, unit.leaves, rank0_only)
            unit.grads.show(to_cpu=offload_to_cpu)
        yield unit
        if writeback and unit.is_agreed:
            # For callers that use this context manager without ``_unshard_states``.
            unit.take_assigned()
            shards = [region.shard for region in handle.layout.regions]
            spread_flat_values(handle, shards, unit.fulls, from_first=rank0_only)
            moments.changes.shards_written(handle)
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
        # Then ``fulls`` are the shards, to which the block must not write yet: copy.
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


class UnshardedGrads:
    """The gradients that a block shows on the full ``leaves``.

    ``leaves`` is empty on ranks that show no full parameters.
    """

    __slots__ = ("_handle", "_leaves", "_rank0_only")

    def __init__(
        self, handle: FlatParamHandle, leaves: list[nn.Parameter], rank0_only: bool
    ) -> None:
        self._handle, self._leaves = handle, leaves
        self._rank0_only = rank0_only

    @torch.no_grad()
    def show(self, *, to_cpu: bool) -> None:
        """Set ``.grad`` of the full parameters to the full gradients.

        Collective: over the shard group a single all-reduce with a byte per parameter;
            if any rank has a gradient, an all-gather, or with ``rank0_only`` a gather
            per region.
        """
        handle, group = self._handle, self._handle.groups.shard
        own = [g for r in handle.layout.regions for g in leaf_gradients(r)]
        # A rank without elements of a parameter has no gradient, but must send alike:
        # agree first which parameters have one.
        has = self._flags(own)
        if group is not None and has.numel():
            collectives.all_reduce(has, group, maximum=True)
        wanted = has.tolist()
        if not any(wanted):
            return
        shards = []
        # Copies, because ``.grad`` of single parameters may be tensors of the user.
        for region, flags, gradients in _by_region(handle, wanted, own):
            shards.append(_new_shard(handle, region, flags))
            views = shard_views(region.cuts, shards[-1])[0] if any(flags) else ()
            for gradient, view in zip(gradients, views, strict=False):
                if gradient is not None:
                    view.copy_(gradient)
        fulls = gather_flat_values(handle, shards, first_only=self._rank0_only)
        regions = _by_region(handle, wanted, self._leaves) if self._leaves else ()
        for (region, flags, leaves), full in zip(regions, fulls, strict=False):
            if not any(flags):
                continue
            # As the full parameters with offload_to_cpu.
            views, _ = full_views(region.layout, full.cpu() if to_cpu else full)
            for leaf, view, flag, slot in zip(
                leaves, views, flags, region.layout.parameters, strict=True
            ):
                # A DTensor takes no plain tensor as ``.grad``.
                whole = handle.layout.forms[slot.index].shown(view)
                leaf.grad = whole if flag else None

    @torch.no_grad()
    def write_back(self) -> None:
        """Set the sharded gradients to this rank's part of the block's full gradients.

        Collective: none; with ``rank0_only`` a single broadcast with a byte per
            parameter over the shard group and over the replicate group, and a scatter
            per region.
        """
        handle = self._handle
        has = self._flags([leaf.grad for leaf in self._leaves])
        # Only rank 0 knows which gradients the block left; the scatter below needs the
        # same regions on all ranks.
        if self._rank0_only:
            for group in handle.groups.present:
                collectives.broadcast(has, group)
        wanted = has.tolist()
        flags_of = [(region, flags) for region, flags in _by_region(handle, wanted)]
        shards = [_new_shard(handle, region, flags) for region, flags in flags_of]
        regions = _by_region(handle, self._leaves) if self._leaves else ()
        fulls = [_full_gradient(handle, region, leaves) for region, leaves in regions]
        spread_flat_values(handle, shards, fulls, from_first=self._rank0_only)
        for (region, flags), shard in zip(flags_of, shards, strict=True):
            # The shard is empty without any gradient.
            views = shard_views(region.cuts, shard)[0] if any(flags) else None
            if views is None and region.flat is not None:
                region.flat.grad = None
            for i, flag in enumerate(flags):
                if views is None:
                    region.leaves[i].grad = None
                else:
                    set_leaf_gradient(handle, region, i, views[i] if flag else None)

    def hide(self) -> None:
        """Remove the gradients from the full parameters, which outlive the block."""
        for leaf in self._leaves:
            leaf.grad = None

    def _flags(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return a byte per parameter on the compute device: 1 with a gradient."""
        held = [g is not None for g in gradients] or [False] * len(self._handle.leaves)
        device = self._handle.layout.device
        return torch.tensor(held, dtype=torch.uint8, device=device)


def _by_region(handle: FlatParamHandle, *values: list[Any]) -> Iterator[Any]:
    """Yield each region with its part of ``values``, an entry per parameter."""
    start = 0
    for region in handle.layout.regions:
        stop = start + len(region.leaves)
        yield region, *(each[start:stop] for each in values)
        start = stop


def _new_shard(
    handle: FlatParamHandle, region: FlatParameter, flags: list[int]
) -> Tensor:
    """Return zeros ``(shard_numel,)``; empty if no parameter has a gradient."""
    numel = region.layout.shard_numel if any(flags) else 0
    return memory.new_buffer(numel, region.layout.dtype, handle.layout.device).zero_()


def _full_gradient(
    handle: FlatParamHandle, region: FlatParameter, leaves: list[nn.Parameter]
) -> Tensor:
    """Return the gradients of the full ``leaves`` as ``(padded_numel,)``, or empty."""
    has_any = any(leaf.grad is not None for leaf in leaves)
    numel = region.layout.padded_numel if has_any else 0
    full = memory.new_buffer(numel, region.layout.dtype, handle.layout.device).zero_()
    views = full_views(region.layout, full)[0] if has_any else ()
    for leaf, view, slot in zip(leaves, views, region.layout.parameters, strict=False):
        if leaf.grad is not None:
            # The block may have set a gradient of other placements.
            given = handle.layout.forms[slot.index].gradient(leaf.grad)
            # A sparse one would raise here and leave the other ranks waiting.
            view.copy_(given.to_dense())
    return full


@torch.no_grad()
def require_same_values(handle: FlatParamHandle, fulls: Sequence[Tensor]) -> None:
    """Refuse full values ``(padded_numel,)`` that differ between the unit's ranks.

    Collective: a single all-reduce with two numbers per parameter over the shard group
        and over the replicate group.
    Raises: DesyncError with the parameter's name, on all ranks alike.
    """
    names: list[str] = []
    whole: list[Tensor] = []
    for region, full in zip(handle.layout.regions, fulls, strict=True):
        pieces, _ = full_views(region.layout, full)
        for slot, piece in zip(region.layout.parameters, pieces, strict=True):
            names.append(slot_path(handle, slot))
            whole.append(piece)
    if not whole:
        return
    mine = hash_values(whole).to(handle.layout.device)
    # A single maximum gives the maximum and, of the inverted bits, the minimum; equal
    # ends mean equal values on all ranks. The negative would overflow.
    ends = torch.cat([mine, ~mine])
    for group in handle.groups.present:
        collectives.all_reduce(ends, group, maximum=True)
    largest, smallest = ends[: len(names)], ~ends[len(names) :]
    unlike = (largest != smallest).tolist()
    if any(unlike):
        count = sum(unlike)
        more = f" and {count - 1} more of its unit" if count > 1 else ""
        raise DesyncError(
            f"Parameter {quoted(names[unlike.index(True)])}{more} was written "
            "differently on the ranks inside unshard_params, where each rank keeps the "
            "part that it holds; nothing was written. Write the same on every rank, or "
            "pass rank0_only=True to give all of them rank 0's values."
        )
