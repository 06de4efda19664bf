"""Full parameters of a single unit while a block runs outside the step.

The block sees new parameters over new buffers, in the parameters' dtype; the unit stays
sharded underneath. Nothing frees this memory under a tensor that the block keeps, and
parameters that it keeps show this rank's rows afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_flat_values, spread_flat_values
from composable_fsdp.comm import collectives
from composable_fsdp.errors import DesyncError, PhaseError
from composable_fsdp.flat import memory, part_guards, residency
from composable_fsdp.flat.build import full_leaves, full_views
from composable_fsdp.flat.flat_parameter import leaf_gradients, set_leaf_gradient
from composable_fsdp.flat.gradients import shard_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import param_refs, place_path, slot_path
from composable_fsdp.flat.region import FlatParameter, part_of
from composable_fsdp.flat.residency import version_of, written
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase
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
            got = type(found).__name__
            if isinstance(found, Tensor):
                got = f"{tuple(found.shape)} {found.dtype}"
                is_own = shown is expected and found.dtype == home.dtype
                if is_own and found.is_set_to(home):
                    continue
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
        handle, regions = self.handle, self.handle.layout.regions
        own = [leaf_gradients(region) for region in regions]
        # A rank without elements of a parameter has no gradient, but must send alike:
        # agree first which parameters have one.
        has = self._flags([*chain(*own)])
        if handle.groups.shard is not None and has.numel():
            collectives.all_reduce(has, handle.groups.shard, maximum=True)
        flags = iter(has.tolist())
        wanted = [[next(flags) for _ in region.leaves] for region in regions]
        shards = [
            self._gradient_shard(region, gradients if any(each) else None)
            for region, each, gradients in zip(regions, wanted, own, strict=True)
        ]
        if not any(shard.numel() for shard in shards):
            return
        fulls = gather_flat_values(handle, shards, first_only=self.rank0_only)
        leaves = iter(self.leaves)
        for region, each, full in zip(regions, wanted, fulls, strict=False):
            # As the full parameters with offload_to_cpu.
            here = full.cpu() if to_cpu else full
            views = full_views(region.layout, here)[0] if full.numel() else each
            slots = region.layout.parameters
            for slot, view, flag, leaf in zip(slots, views, each, leaves, strict=False):
                # A DTensor takes no plain tensor as ``.grad``.
                form = handle.layout.forms[slot.index]
                leaf.grad = form.shown(view) if flag else None

    def _gradient_shard(
        self, region: FlatParameter, gradients: Iterable[Tensor | None] | None
    ) -> Tensor:
        """Return a region's gradients as a new shard; without any, an empty one."""
        layout, device = region.layout, self.handle.layout.device
        if gradients is None or not layout.shard_numel:
            return memory.new_buffer(0, layout.dtype, device)
        # A copy, because ``.grad`` of single parameters may be tensors of the user.
        shard = memory.new_buffer(layout.shard_numel, layout.dtype, device).zero_()
        views = shard_views(region.cuts, shard)[0]
        for view, gradient in zip(views, gradients, strict=False):
            if gradient is not None:
                view.copy_(gradient)
        return shard

    @torch.no_grad()
    def write_gradients(self) -> None:
        """Set the sharded gradients to this rank's part of the block's full gradients.

        Collective: none; with ``rank0_only`` over the shard group and over the
            replicate group a broadcast with a byte per parameter, and one per gradient.
        """
        handle = self.handle
        # The block may have set gradients of other placements, or sparse ones, which
        # would raise later and leave the other ranks waiting.
        given = [
            None if leaf.grad is None else ref.form.gradient(leaf.grad).to_dense()
            for ref, leaf in zip(param_refs(handle), self.leaves, strict=False)
        ]
        has = self._flags(given)
        # Only rank 0 knows which gradients the block left.
        sends = handle.groups.present if self.rank0_only else ()
        for group in sends:
            collectives.broadcast(has, group)
        values, flags = iter(given or [None] * len(has)), iter(has.tolist())
        for region in handle.layout.regions:
            wanted = [next(flags) for _ in region.leaves]
            for index, (slot, flag) in enumerate(
                zip(region.layout.parameters, wanted, strict=True)
            ):
                value, part = next(values), None
                if flag:
                    numel, device = prod(slot.shape), handle.layout.device
                    if value is None:
                        value = memory.new_buffer(numel, region.layout.dtype, device)
                    whole = value.to(device).contiguous()
                    for group in sends if numel else ():
                        collectives.broadcast(whole, group)
                    part = part_of(region, slot, whole, like=region.leaves[index])
                set_leaf_gradient(handle, region, index, part)
            for parameter in () if any(wanted) else region.graded:
                parameter.grad = None

    def _flags(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return a byte per parameter on the compute device: 1 with a gradient."""
        held = [g is not None for g in gradients] or [False] * len(self.handle.leaves)
        device = self.handle.layout.device
        return torch.tensor(held, dtype=torch.uint8, device=device)


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

    Collective: an all-gather of objects over the shard and the replicate group.
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
    told = [hash_values(whole).tolist()]
    for group in handle.groups.present:
        # After the first group a rank passes on what the whole group has.
        told = [*chain(*collectives.all_gather_object(told, group))]
    unlike = [n for n, *each in zip(names, *told, strict=True) if len(set(each)) > 1]
    if unlike:
        more = f" and {len(unlike) - 1} more of its unit" if unlike[1:] else ""
        raise DesyncError(
            f"Parameter {quoted(unlike[0])}{more} was written differently on the ranks "
            "inside unshard_params, where each rank keeps the part that it holds; "
            "nothing was written. Write the same on every rank, or pass "
            "rank0_only=True to give all of them rank 0's values."
        )
