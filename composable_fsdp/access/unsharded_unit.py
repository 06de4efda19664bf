"""Full parameters of a single unit while a block runs outside the step.

The block sees new parameters over new buffers, in the parameters' dtype; the unit stays
sharded underneath. Nothing frees this memory under a tensor that the block keeps, and
parameters that it keeps show this rank's rows afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

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
from composable_fsdp.flat.param_paths import place_path, slot_path
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.flat.residency import version_of
from composable_fsdp.flat.step_counts import written
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
        """Increment the versions of sharded parameters that the block wrote to."""
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


T = TypeVar("T")


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
    def write_back(self) -> None:
        """Set the sharded gradients to this rank's part of the block's full gradients.

        Collective: none; with ``rank0_only`` a single broadcast with a byte per
            parameter over the shard group and over the replicate group, and a scatter
            per region.
        """
        handle = self._handle
        has = _flags(handle, [leaf.grad for leaf in self._leaves])
        # Only rank 0 knows which gradients the block left; the scatter below needs the
        # same regions on all ranks.
        if self._rank0_only:
            for group in handle.groups.present:
                collectives.broadcast(has, group)
        wanted = has.tolist()
        shards = [
            _new_shard(handle, region, flags)
            for region, flags in _by_region(handle, wanted)
        ]
        fulls = []
        if self._leaves:
            fulls = [
                _full_gradient(handle, region, leaves)
                for region, leaves in _by_region(handle, self._leaves)
            ]
        spread_flat_values(handle, shards, fulls, from_first=self._rank0_only)
        for (region, flags), shard in zip(
            _by_region(handle, wanted), shards, strict=True
        ):
            _set_gradients(handle, region, flags, shard)

    def hide(self) -> None:
        """Remove the gradients from the full parameters, which outlive the block."""
        for leaf in self._leaves:
            leaf.grad = None


@torch.no_grad()
def unshard_grads(
    handle: FlatParamHandle,
    leaves: list[nn.Parameter],
    *,
    rank0_only: bool,
    to_cpu: bool,
) -> UnshardedGrads:
    """Set ``.grad`` of the full parameters ``leaves`` to the full gradients.

    Collective: over the shard group a single all-reduce with a byte per parameter; if
        any rank has a gradient, an all-gather, or with ``rank0_only`` a gather per
        region.
    """
    group = handle.groups.shard
    own = [g for r in handle.layout.regions for g in leaf_gradients(r)]
    # A rank may hold no element of a parameter, and so no gradient, but must send the
    # same as the other ranks: agree first which parameters have a gradient.
    has = _flags(handle, own)
    if group is not None and has.numel():
        collectives.all_reduce(has, group, maximum=True)
    wanted = has.tolist()
    shown = UnshardedGrads(handle, leaves, rank0_only)
    # No rank has a gradient, so no rank gathers.
    if not any(wanted):
        return shown
    shards = _gradient_shards(handle, wanted, own)
    fulls = gather_flat_values(handle, shards, first_only=rank0_only)
    if not leaves:
        return shown
    for (region, flags), (_, shown_leaves), full in zip(
        _by_region(handle, wanted), _by_region(handle, leaves), fulls, strict=True
    ):
        if not any(flags):
            continue
        # As the full parameters with offload_to_cpu, the gradients live in host memory.
        views, _ = full_views(region.layout, full.cpu() if to_cpu else full)
        for leaf, view, flag, slot in zip(
            shown_leaves, views, flags, region.layout.parameters, strict=True
        ):
            # A DTensor takes no plain tensor as ``.grad``.
            whole = handle.layout.forms[slot.index].shown(view)
            leaf.grad = whole if flag else None
    return shown


def _gradient_shards(
    handle: FlatParamHandle, wanted: list[int], own: list[Tensor | None]
) -> list[Tensor]:
    """Return this rank's gradients per region, in flat order."""
    shards = []
    # Copies, because ``.grad`` of single parameters may be tensors of the user.
    for (region, flags), (_, gradients) in zip(
        _by_region(handle, wanted), _by_region(handle, own), strict=True
    ):
        shards.append(_new_shard(handle, region, flags))
        views = shard_views(region.cuts, shards[-1])[0] if any(flags) else ()
        for gradient, view in zip(gradients, views, strict=False):
            if gradient is not None:
                view.copy_(gradient)
    return shards


def _by_region(
    handle: FlatParamHandle, values: list[T]
) -> list[tuple[FlatParameter, list[T]]]:
    """Split ``values``, an entry per parameter of the unit, by region."""
    result, start = [], 0
    for region in handle.layout.regions:
        stop = start + len(region.leaves)
        result.append((region, values[start:stop]))
        start = stop
    return result


def _flags(handle: FlatParamHandle, gradients: Sequence[Tensor | None]) -> Tensor:
    """Return a byte per parameter on the compute device: 1 with a gradient."""
    held = [each is not None for each in gradients] or [False] * len(handle.leaves)
    return torch.tensor(held, dtype=torch.uint8, device=handle.layout.device)


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
    if all(leaf.grad is None for leaf in leaves):
        return memory.new_buffer(0, region.layout.dtype, handle.layout.device)
    numel = region.layout.padded_numel
    full = memory.new_buffer(numel, region.layout.dtype, handle.layout.device).zero_()
    views, _ = full_views(region.layout, full)
    for leaf, view, slot in zip(leaves, views, region.layout.parameters, strict=True):
        if leaf.grad is not None:
            # The block may have set a gradient of other placements.
            given = handle.layout.forms[slot.index].gradient(leaf.grad)
            # A sparse gradient is converted: an exception here would leave the other
            # ranks waiting.
            view.copy_(given.to_dense())
    return full


def _set_gradients(
    handle: FlatParamHandle, region: FlatParameter, flags: list[int], shard: Tensor
) -> None:
    """Set ``.grad`` of sharded parameters to their parts of ``shard``, or to None."""
    if not any(flags):
        # The shard is empty then, so there are no views.
        if region.flat is not None:
            region.flat.grad = None
        for leaf in region.leaves:
            leaf.grad = None
        return
    views, _ = shard_views(region.cuts, shard)
    for i, flag in enumerate(flags):
        set_leaf_gradient(handle, region, i, views[i] if flag else None)


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
