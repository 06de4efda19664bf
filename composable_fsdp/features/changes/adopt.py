"""Takes up changes that were made to a unit's parameters outside the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import lcm
from operator import is_

import torch
from torch import nn

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.comm.groups import operation_log
from composable_fsdp.errors import PhaseError, PlanError
from composable_fsdp.flat.build import replace_layout
from composable_fsdp.flat.flat_parameter import rebind_flat_parameters
from composable_fsdp.flat.gradients import shard_views
from composable_fsdp.flat.handle import FlatParamHandle, forget_leaves
from composable_fsdp.flat.param_ref import param_refs, place_path, record_replaced
from composable_fsdp.flat.residency import shards_are_unchanged
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.planning.dtensors import is_dtensor
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.partition import SHARD_ALIGNMENT, round_up
from composable_fsdp.planning.planner import Target
from composable_fsdp.runtime.grad_hooks import install_grad_hooks
from composable_fsdp.runtime.meta_values import end_watch
from composable_fsdp.runtime.offload import (
    finish_d2h_grad_copies,
    synchronize_copy_stream,
)
from composable_fsdp.runtime.recover import own_buffers
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.unshard import free_oldest, release
from composable_fsdp.tree.root import ensure_root, set_streams, unit_paths
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of


@outside_transforms
def adopt(state: _FSDPState, *, values_required: bool = True) -> None:
    """Make the shards of the sharded unit hold what the modules show."""
    handle, context = state.handle, state.context
    if shards_are_unchanged(handle):
        return
    device, was_on_meta = handle.layout.device, handle.layout.on_meta
    shown = (table.get(name) for table, name, _, _ in handle.swaps)
    if (
        not values_required
        and was_on_meta
        and all(p is not None and p.is_meta for p in shown)
    ):
        return
    with _told_to_all(state):
        if context is not None:
            synchronize_copy_stream(context)
            # The old buffers are freed below, so no stream may still read them.
            finish_reduction(context)
            free_oldest(context, keep=0)
        if was_on_meta:
            end_watch(state)
        if not require_leaves(handle):
            return
        # The rebuilt regions have new full parameters, which have no hooks yet.
        install_grad_hooks(state)
        if was_on_meta:
            _place_buffers(state)
        if handle.layout.device != device and context is not None:
            _move_unit(context, handle.layout.device)


@outside_transforms
def follow_flags(state: _FSDPState) -> bool:
    """Move parameters that were frozen or unfrozen to regions of their kind."""
    handle = state.handle
    if all(p.requires_grad is full.requires_grad for *_, p, full in handle.swaps):
        return False
    with _told_to_all(state):
        context = ensure_root(state)
        finish_reduction(context)
        finish_d2h_grad_copies(context)
        if handle.reduction.due or handle.reduction.held is not None:
            raise PhaseError(
                f"requires_grad of parameters of unit {handle.name} was changed while "
                "its gradients wait to be reduced (no_sync, set_requires_gradient_sync "
                "or set_requires_all_reduce). Freeze and unfreeze after the backward "
                "that reduces."
            )
        # Free the full buffers first: the regions are rebuilt below.
        release(context, handle)
        leaves = {ref.slot.index: ref.leaf for ref in param_refs(handle)}
        trains = {index: leaf.requires_grad for index, leaf in leaves.items()}
        _rebuild(handle, leaves, trains, device=handle.layout.device)
        # The new regions have new full parameters without hooks.
        install_grad_hooks(state)
    return True


def is_in_shards(handle: FlatParamHandle) -> bool:
    """Return whether the leaves lie in the shards; if not, ``adopt`` sees it."""
    # ``leaf.data = torch.from_numpy(leaf.data.numpy())`` keeps the address and
    # replaces the storage. Of a unit that is kept unsharded all ranks must detect
    # the change, which leads to an all-gather: ranks without elements detect the
    # storage.
    places = handle.writes.memory
    shards = [region.shard.untyped_storage() for region in handle.layout.regions]
    for leaf in places.leaves:
        home = leaf.untyped_storage()
        if not any(home is shard for shard in shards):
            unknown = (0,) * len(places.addresses)
            handle.writes.memory = places._replace(addresses=unknown)
            return False
    return True


@contextmanager
def _told_to_all(state: _FSDPState) -> Iterator[None]:
    """Tell the ranks that wait for this one in its tree, if the block raises."""
    try:
        yield
    except (PhaseError, PlanError) as error:
        # Another rank may have changed nothing, and be in the forward already.
        context = state.context
        handles = (state.handle,) if context is None else context.handles
        for group in dict.fromkeys(g for h in handles for g in h.groups.sending):
            operation_log(group).recorder.raises(str(error.args[0]))
        raise


def _place_buffers(state: _FSDPState) -> None:
    """Move buffers that got values with the parameters to the compute device."""
    meta = []
    for number, name, buffer in own_buffers(state):
        if buffer.is_meta:
            meta.append(quoted(join_name(unit_paths(state)[number], name)))
        # Buffers move in place, so that modules that share a buffer keep sharing.
        elif buffer.device != state.handle.layout.device:
            buffer.data = buffer.to(state.handle.layout.device)
    if meta:
        raise PlanError(
            f"Parameters of unit {state.name} got values, and buffers "
            f"{', '.join(meta)} are still on meta. A state dict has persistent buffers "
            "only: call model.to_empty(device=...) and set the others."
        )


def _move_unit(context: RuntimeContext, device: torch.device) -> None:
    """Follow a unit to its compute device: a root without regions, and streams."""
    root = root_of(context)
    # A root without parameters has no device of its own and follows the first moved
    # unit.
    if root.device != device and not root.handle.layout.regions:
        root.handle.layout = replace(root.handle.layout, device=device)
    # Streams exist only on CUDA: a tree that moved there from the CPU has none yet.
    if root.device == device and context.streams.host_waits:
        set_streams(context, device)


def require_leaves(handle: FlatParamHandle) -> bool:
    """Adopt leaves that were replaced or changed; return if full leaves are new."""
    for parameters, name, leaf, full in handle.swaps:
        # What found a full leaf inside a forward of the unit, and put it back after the
        # unit had been resharded.
        if parameters.get(name) is full:
            parameters[name] = leaf
    if _are_in_place(handle):
        return False
    names: dict[int, str] = {}
    current = _current(handle, names)
    _require_fit(handle, current, names)
    if handle.reduction.due or handle.reduction.held is not None:
        raise PlanError(
            f"Parameters of unit {handle.name} were replaced, cast, moved or given "
            "other data while gradients of no_sync wait to be reduced. Change them "
            "between steps."
        )
    leaves = [
        tuple(current[slot.index] for slot in region.layout.parameters)
        for region in handle.layout.regions
    ]
    record_replaced(handle, [r.leaves for r in handle.layout.regions], leaves)
    trains = {
        slot.index: region.layout.trainable
        for region in handle.layout.regions
        for slot in region.layout.parameters
    }
    _rebuild(handle, current, trains, device=_device(handle, current))
    return True


def _are_in_place(handle: FlatParamHandle) -> bool:
    """Return whether the modules show the leaves, and these lie in the shards."""
    # Unlike ``shards_are_unchanged``, also if leaves were frozen or unfrozen.
    places = handle.writes.memory
    return (
        not handle.layout.on_meta
        and all(table.get(key) is leaf for table, key, leaf, _ in handle.swaps)
        and places.addresses == tuple(leaf.data_ptr() for leaf in places.leaves)
        and all(
            map(is_, map(torch.Tensor.untyped_storage, places.empty), places.storages)
        )
    )


def _current(handle: FlatParamHandle, names: dict[int, str]) -> dict[int, nn.Parameter]:
    """Return, by slot index, the parameter that the modules show; fill ``names``."""
    current: dict[int, nn.Parameter] = {}
    for at, (place, (parameters, key, leaf, _)) in enumerate(
        zip(handle.layout.places, handle.swaps, strict=True)
    ):
        # The first place of a tied parameter names the parameter.
        fqn = names.setdefault(place.slot_index, place_path(handle, at))
        found = parameters.get(key)
        if not isinstance(found, nn.Parameter) or is_dtensor(found):
            raise PlanError(
                f"Parameter {quoted(fqn)} was removed or replaced by a "
                f"{type(found).__name__} after fully_shard (torch.func.functional_call "
                "does so for a while). Change modules before fully_shard."
            )
        first = current.setdefault(place.slot_index, found)
        # On meta, different objects are legal: ``to_empty`` creates a parameter for
        # each place.
        if found is not first and not leaf.is_meta:
            raise PlanError(
                f"The places of tied parameter {quoted(fqn)} show different parameters "
                "since fully_shard. Assign to all of them, or untie before fully_shard."
            )
        if first is leaf:
            current[place.slot_index] = found
    return current


def _require_fit(
    handle: FlatParamHandle, current: dict[int, nn.Parameter], names: dict[int, str]
) -> None:
    """Raise PlanError if a parameter in ``current`` cannot be a leaf of its region."""
    meta = [quoted(names[i]) for i, parameter in current.items() if parameter.is_meta]
    if meta:
        raise PlanError(
            f"Parameters {listed(meta)} are still on the meta device, so "
            "they have no values. Call init_weights(model), or model.to_empty("
            "device=...) and then load, on every rank; or pass param_init_fn to "
            "fully_shard."
        )
    # A region has a single dtype, and parameters that were frozen since may come back
    # to the region that they had.
    dtypes = {
        slot.index: current[layout.parameters[0].index].dtype
        for layout in handle.layout.origin
        for slot in layout.parameters
    }
    for region in handle.layout.regions:
        homes, _ = shard_views(region.cuts, region.shard)
        for slot, home in zip(region.layout.parameters, homes, strict=True):
            fqn, found = names[slot.index], current[slot.index]
            if found.shape != home.shape or found.dtype != dtypes[slot.index]:
                raise _misfit(fqn, home, found)
            if handle.layout.offload and found.device.type != "cpu":
                raise PlanError(
                    f"Parameter {quoted(fqn)} was moved to {found.device} after "
                    "fully_shard with cpu_offload, which keeps it on the host. Move "
                    "the model before fully_shard, or not at all: the compute device "
                    f"is {handle.layout.device}."
                )


def _device(handle: FlatParamHandle, current: dict[int, nn.Parameter]) -> torch.device:
    """Return the compute device after the change."""
    devices = {parameter.device for parameter in current.values()}
    # A CPU was the compute device because the parameters were there, so the unit
    # follows them. A GPU was chosen and stays.
    if (
        handle.layout.device.type == "cpu"
        and len(devices) == 1
        and not handle.layout.offload
    ):
        return devices.pop()
    return handle.layout.device


def _misfit(fqn: str, expected: torch.Tensor, got: torch.Tensor) -> PlanError:
    """Return the error for a parameter that does not fit its place in the shard."""
    return PlanError(
        f"Parameter {quoted(fqn)} was changed after fully_shard: its shard on this "
        f"rank is {tuple(expected.shape)} {expected.dtype} ({expected.numel()} "
        f"elements), found {tuple(got.shape)} {got.dtype}. To change "
        "values, write in place inside unshard_params, or call set_full_param; to "
        "change shapes, change the plain model before fully_shard. A cast of the "
        "whole model is taken up; a region has one dtype."
    )


def _rebuild(
    handle: FlatParamHandle,
    leaves: dict[int, nn.Parameter],
    trains: dict[int, bool],
    *,
    device: torch.device,
) -> None:
    """Build the regions of an idle unit anew over ``leaves``, by slot index."""
    forget_leaves(handle)
    before = handle.layout
    origin: list[RegionLayout] = []
    layouts: list[RegionLayout] = []
    for layout in before.origin:
        if layout.parameters:
            layout = replace(layout, dtype=leaves[layout.parameters[0].index].dtype)
        flags = [trains[slot.index] for slot in layout.parameters]
        origin.append(layout)
        # Every rank keeps the same elements: regions are only split along the planned
        # layout, even if a narrower dtype makes shards less than 16-byte aligned.
        layouts += split_region(layout, flags) if flags else (layout,)
    # Places must be in the order of the new regions.
    order = [slot.index for layout in layouts for slot in layout.parameters]
    at = {index: i for i, index in enumerate(order)}
    placed = sorted(
        zip(before.places, before.owners, strict=True),
        key=lambda pair: at[pair[0].slot_index],
    )
    target = Target(
        replace(before.plan, regions=tuple(layouts)),
        tuple(tuple(leaves[s.index] for s in each.parameters) for each in layouts),
        tuple(place for place, _ in placed),
        tuple(owner for _, owner in placed),
    )
    replace_layout(handle, target, origin=tuple(origin), device=device)
    for leaf in handle.leaves:
        if leaf.grad is not None and leaf.grad.device != leaf.device:
            # Torch requires ``.grad`` and the parameter to be on the same device.
            leaf.grad = None
    rebind_flat_parameters(handle, before.regions)
    # Tied places that still show another parameter get the adopted parameter.
    for parameters_of, name, leaf, _ in handle.swaps:
        parameters_of[name] = leaf


def split_region(
    layout: RegionLayout, trainable: Sequence[bool]
) -> tuple[RegionLayout, ...]:
    """Return the parts of a region, whose elements stay on their rank."""
    parts = []
    for flag in (True, False):
        chosen = [
            slot
            for slot, wanted in zip(layout.parameters, trainable, strict=True)
            if wanted is flag
        ]
        if len(chosen) == len(layout.parameters):
            # All flags are equal: nothing moves, only ``trainable`` changes.
            return (replace(layout, trainable=flag),)
        parts.append(_compact(layout, chosen, trainable=flag))
    return tuple(parts)


def _compact(
    layout: RegionLayout, slots: list[ParameterSlot], *, trainable: bool
) -> RegionLayout:
    """Return a region of ``slots`` with the shard size of the rank that needs most."""
    # Elements per 16 bytes: every part starts aligned.
    unit = max(SHARD_ALIGNMENT // layout.dtype.itemsize, 1)
    # Shards have equal sizes, so the rank that needs most decides.
    size = _size(layout, slots, unit)
    while size > layout.shard_numel:
        # Parameters that were cast to a narrower dtype are aligned to fewer bytes. In a
        # larger shard one that covers whole ranks would be cut at other elements.
        unit //= 2
        size = _size(layout, slots, unit)
    return replace(
        layout,
        trainable=trainable,
        numel=sum(slot.numel for slot in slots),
        padded_numel=size * layout.world_size,
        shard_numel=size,
        parameters=tuple(_place(layout, slots, size, unit)),
    )


def _size(layout: RegionLayout, slots: list[ParameterSlot], unit: int) -> int:
    """Elements of a shard in which every rank finds room for its parts."""
    needed = 0
    for rank in range(layout.world_size):
        total = 0
        for start, stop in (layout.interval(slot, rank) for slot in slots):
            # Ranks without elements of the parameter need no space.
            if stop > start:
                total = round_up(total, unit) + stop - start
        needed = max(needed, total)
    # Blocks of a wire format are cut by no shard boundary; ``layout.shard_numel`` is a
    # multiple of them, so the new shard is not larger.
    grid = layout.wire.grid if layout.wire else 1
    return round_up(needed, lcm(unit, grid))


def _place(
    layout: RegionLayout, slots: list[ParameterSlot], size: int, unit: int
) -> list[ParameterSlot]:
    """Return ``slots`` with new offsets, for shards of ``size`` elements."""
    placed = []
    end = 0
    for slot in slots:
        offset = end
        # An empty parameter needs no position of its own.
        if slot.numel:
            # The first rank that holds elements, and their number there.
            first = slot.offset // layout.shard_numel
            part = min(layout.shard_numel * (first + 1) - slot.offset, slot.numel)
            if part < slot.numel:
                # It continues at the start of the next rank's shard.
                offset = (first + 1) * size - part
            else:
                # Behind the previous part, and not before this rank's shard.
                offset = max(round_up(end, unit), first * size)
        placed.append(replace(slot, offset=offset))
        end = offset + slot.numel
    return placed
