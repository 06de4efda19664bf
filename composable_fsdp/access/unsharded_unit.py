"""Full parameters of a single unit while a block runs outside the step.

The block sees new parameters over new buffers, in the parameters' dtype; the unit stays
sharded underneath. Nothing frees this memory under a tensor that the block keeps, and
parameters that it keeps show this rank's rows afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

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
from composable_fsdp.flat.param_ref import param_refs, place_path, slot_path
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.flat.residency import version_of, written
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase, illegal_move
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.runtime.unshard import reshard
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _FSDPState

NO_STEPS: WeakKeyDictionary[FlatParamHandle, str] = WeakKeyDictionary()
"""Why optimizers may not step on a unit now; ``{}`` stands for the name of a parameter.
Weak: a model may be dropped while it sleeps."""
_SHOWN = (
    "inside unshard_params, which shows {} full; the end of the block would write the "
    "full values over the step. Call it after the block."
)


def require_awake(handles: Iterable[FlatParamHandle], call: str) -> None:
    """Refuse a call that would take the empty parameters of a sleeping unit for its."""
    for handle in handles if NO_STEPS else ():
        if (why := NO_STEPS.get(handle, _SHOWN)) is not _SHOWN:
            raise PhaseError(f"{call} was called {why.format(handle.name)}")


class UnshardedUnit:
    """The full parameters that a block shows on this rank for a unit.

    With ``rank0_only`` all ranks but the first show sharded parameters; ``fulls`` and
    ``leaves`` are then empty.
    """

    __slots__ = ("fulls", "handle", "is_agreed", "leaves", "rank0_only", "versions")

    def __init__(self, handle: FlatParamHandle, *, rank0_only: bool) -> None:
        self.handle, self.rank0_only = handle, rank0_only
        self.fulls: list[Tensor] = []
        """Per region ``(padded_numel,)``."""
        self.leaves: list[nn.Parameter] = []
        """The full parameters, in each block the same, as the sharded ones lie."""
        self.is_agreed = True
        """Whether writes of the block may be kept: no rank of the unit raised."""
        self.versions: list[int] = []
        """Version counters of ``leaves`` before the block."""

    def show(self, *, to_cpu: bool) -> None:
        """Gather into new buffers of the parameter dtype; show leaves over them."""
        handle, layout = self.handle, self.handle.layout
        shards = [region.shard.to(layout.device) for region in layout.regions]
        fulls = gather_flat_values(handle, shards, first_only=self.rank0_only)
        if layout.regions and not fulls:
            return
        # Tensors made in inference mode could not be written to outside of that mode.
        with torch.inference_mode(False), torch.no_grad():
            # Without a shard group ``fulls`` are the shards, to which the block must
            # not write yet: copy.
            alone = handle.groups.shard is None
            home = torch.device("cpu") if to_cpu else layout.device
            self.fulls = [full.to(home, copy=alone) for full in fulls]
            self._lay_leaves()
        made = dict(zip(map(id, handle.leaves), self.leaves, strict=True))
        for parameters, name, sharded, _ in handle.swaps:
            parameters[name] = made[id(sharded)]
        # Modules inside the unit may be called on full parameters.
        part_guards.allow_part_calls(handle)
        residency.move(handle, residency.COPIES_SHOWN)
        self.versions = [*map(version_of, self.leaves)]

    def _lay_leaves(self) -> None:
        """Lay the full parameters, which the first block makes, over ``fulls``."""
        handle = self.handle
        made = not handle.block_leaves
        pieces: list[Tensor] = []
        for region, full in zip(handle.layout.regions, self.fulls, strict=True):
            parts, _ = full_views(region.layout, full)
            pieces += parts
            if made:
                handle.block_leaves += full_leaves(
                    region.layout, parts, region.leaves, handle.layout.forms
                )
        self.leaves = handle.block_leaves
        for leaf, piece, own in zip(self.leaves, pieces, handle.leaves, strict=True):
            local_of(leaf).data = piece
            leaf.requires_grad = own.requires_grad

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Copy parameters that the block assigned into the buffers; refuse misfits."""
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

    def write(self) -> None:
        """Copy this rank's part of the full values into the shards."""
        handle = self.handle
        shards = [region.shard for region in handle.layout.regions]
        spread_flat_values(handle, shards, self.fulls, from_first=self.rank0_only)
        now, before = [*map(version_of, self.leaves)], written(handle.layout)
        if self.rank0_only or now == self.versions:
            return
        counts = zip(handle.leaves, now, self.versions, strict=True)
        # A backward of a forward from before the block then raises, as in plain torch.
        torch.autograd.graph.increment_version(
            [leaf for leaf, version, earlier in counts if version != earlier]
        )
        # ``at_build`` detects torch's init functions on bare shards. The block wrote
        # full values, which is legal: move the mark along.
        if handle.writes.at_build == before:
            handle.writes.at_build = written(handle.layout)

    def hide(self) -> None:
        """Make the parameters of the block, which a user may keep, show the shards."""
        regions = self.handle.layout.regions
        views = (shard_views(region.cuts, region.shard)[0] for region in regions)
        for parameter, home in zip(self.leaves, chain(*views), strict=False):
            # A DTensor keeps its values, because the shard is no DTensor.
            if not is_dtensor(parameter):
                parameter.data = home

    @torch.no_grad()
    def show_gradients(self, *, to_cpu: bool) -> None:
        """Set ``.grad`` of the full parameters to the full gradients.

        Collective: over the shard group a single all-reduce with a byte per parameter;
            if any rank has a gradient, an all-gather, or with ``rank0_only`` a gather
            per region.
        """
        handle, group = self.handle, self.handle.groups.shard
        own = [g for region in handle.layout.regions for g in leaf_gradients(region)]
        # A rank without elements of a parameter has no gradient, but must send alike:
        # agree first which parameters have one.
        has = self._flags(own)
        if group is not None and has.numel():
            collectives.all_reduce(has, group, maximum=True)
        wanted = has.tolist()
        if not any(wanted):
            return
        # Copies, because ``.grad`` of single parameters may be tensors of the user.
        parts = self._by_region(wanted, own)
        shards = [_laid(handle, *each, whole=False)[0] for each in parts]
        fulls = gather_flat_values(handle, shards, first_only=self.rank0_only)
        shown = self._by_region(wanted, self.leaves) if self.leaves else ()
        for (region, flags, leaves), full in zip(shown, fulls, strict=False):
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
    def write_gradients(self) -> None:
        """Set the sharded gradients to this rank's part of the block's full gradients.

        Collective: none; with ``rank0_only`` a single broadcast with a byte per
            parameter over the shard group and over the replicate group, and a scatter
            per region.
        """
        handle = self.handle
        # The block may have set gradients of other placements, or sparse ones, which
        # would raise later and leave the other ranks waiting.
        given = [
            None if leaf.grad is None else ref.form.gradient(leaf.grad).to_dense()
            for ref, leaf in zip(param_refs(handle), self.leaves, strict=False)
        ]
        has = self._flags(given)
        # Only rank 0 knows which gradients the block left; the scatter below needs the
        # same regions on all ranks.
        if self.rank0_only:
            for group in handle.groups.present:
                collectives.broadcast(has, group)
        held = [gradient is not None for gradient in given]
        parts = self._by_region(held, given) if given else ()
        fulls = [_laid(handle, *each, whole=True)[0] for each in parts]
        flags_of = list(self._by_region(has.tolist()))
        made = [_laid(handle, *each, whole=False) for each in flags_of]
        shards = [shard for shard, _ in made]
        spread_flat_values(handle, shards, fulls, from_first=self.rank0_only)
        for (region, flags), (_, views) in zip(flags_of, made, strict=True):
            if not any(flags):
                for parameter in region.graded:
                    parameter.grad = None
                continue
            for i, (flag, view) in enumerate(zip(flags, views, strict=True)):
                set_leaf_gradient(handle, region, i, view if flag else None)

    def _flags(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return a byte per parameter on the compute device: 1 with a gradient."""
        held = [g is not None for g in gradients] or [False] * len(self.handle.leaves)
        device = self.handle.layout.device
        return torch.tensor(held, dtype=torch.uint8, device=device)

    def _by_region(self, *values: Sequence[Any]) -> Iterator[Any]:
        """Yield each region with its part of ``values``, an entry per parameter."""
        start = 0
        for region in self.handle.layout.regions:
            stop = start + len(region.leaves)
            yield region, *(each[start:stop] for each in values)
            start = stop


def _laid(
    handle: FlatParamHandle,
    region: FlatParameter,
    flags: Sequence[Any],
    gradients: Sequence[Tensor | None] = (),
    *,
    whole: bool,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return gradients as ``full`` or the shard lies, and views; empty without any."""
    layout = region.layout
    numel = layout.padded_numel if whole else layout.shard_numel
    numel = numel if any(flags) else 0
    buffer = memory.new_buffer(numel, layout.dtype, handle.layout.device).zero_()
    if not any(flags):
        return buffer, ()
    cut = full_views(layout, buffer) if whole else shard_views(region.cuts, buffer)
    for gradient, view in zip(gradients, cut[0], strict=False):
        if gradient is not None:
            view.copy_(gradient)
    return buffer, cut[0]


@contextmanager
def _unshard_state(
    state: _FSDPState,
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[UnshardedUnit]:
    """Show full parameters of a single unit. Collective: see ``unshard_params``."""
    context, handle = ensure_root(state), state.handle
    if handle.phase is Phase.SUMMON:
        raise PhaseError(
            f"Fully sharded module {handle.name} is shown by another block of "
            "unshard_params; its end would take the parameters from both. Use one."
        )
    if Phase.SUMMON not in handle.phase.followers:
        raise illegal_move(handle.name, handle.phase, Phase.SUMMON)
    handle.phase = Phase.SUMMON
    NO_STEPS[handle] = _SHOWN
    # The optimizer wrote the shards on the caller's stream.
    context.streams.wait_for_caller()
    unit = UnshardedUnit(handle, rank0_only=rank0_only)
    try:
        unit.show(to_cpu=offload_to_cpu)
        if with_grads:
            unit.show_gradients(to_cpu=offload_to_cpu)
        yield unit
        if writeback and unit.is_agreed:
            unit.write()
            if with_grads:
                unit.write_gradients()
    finally:
        # Also after an exception, so that the unit is sharded and can run again.
        handle.phase = Phase.IDLE
        NO_STEPS.pop(handle, None)
        # The full parameters outlive the block.
        for leaf in unit.leaves if with_grads else ():
            leaf.grad = None
        reshard(context, handle)
        unit.hide()


@torch.no_grad()
def require_same_values(unit: UnshardedUnit) -> None:
    """Refuse full values of a block that differ between the unit's ranks.

    Collective: a single all-reduce with two numbers per parameter over the shard group
        and over the replicate group.
    Raises: DesyncError with the parameter's name, on all ranks alike.
    """
    handle = unit.handle
    names: list[str] = []
    whole: list[Tensor] = []
    for region, full in zip(handle.layout.regions, unit.fulls, strict=True):
        pieces, _ = full_views(region.layout, full)
        for slot, piece in zip(region.layout.parameters, pieces, strict=True):
            names.append(slot_path(handle, slot))
            whole.append(piece)
    # Where a rank raised, nothing is written.
    if not (whole and unit.is_agreed):
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
