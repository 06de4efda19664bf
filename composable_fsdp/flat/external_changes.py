"""Detecting and adopting parameters that were changed outside the shard since build.

``module.to(dtype)``, ``to_empty``, ``load_state_dict(assign=True)`` or an assignment
gives a module parameters with memory of their own; without detection, training would
continue with the old values. Every iteration checks once.

A changed parameter is adopted as plain modules do: the parameter that a module shows is
the parameter from now on, with its dtype. So an optimizer created after the change
holds the right objects.
"""

from __future__ import annotations

import torch
from torch import nn

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.build import leaf_memory
from composable_fsdp.flat.build_region import full_views, own_memory
from composable_fsdp.flat.gradients import shard_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.rebuild import rebuild_handle
from composable_fsdp.flat.replaced import record_replaced
from composable_fsdp.flat.residency import shards_are_unchanged
from composable_fsdp.naming import join_name, quoted


def leaves_view_shards(handle: FlatParamHandle) -> bool:
    """Return whether the leaves with elements share the storage of the shard.

    Stricter than the address comparison of ``shards_are_unchanged``.
    """
    # ``leaf.data = torch.from_numpy(leaf.data.numpy())`` keeps the address and replaces
    # the storage. The difference matters for a unit that is kept unsharded: a changed
    # leaf leads to an all-gather, so all ranks must detect the change. Ranks without
    # elements detect the change by the storage.
    for region in handle.layout.regions:
        memory = region.shard.untyped_storage()
        for leaf in region.leaves:
            if leaf.numel() and leaf.untyped_storage() is not memory:
                return False
    return True


def requires_grad_changed(handle: FlatParamHandle) -> bool:
    """Return whether the ``requires_grad`` of a leaf differs from the region's flag."""
    return any(
        leaf.requires_grad is not full.requires_grad for *_, leaf, full in handle.swaps
    )


def require_leaves(handle: FlatParamHandle) -> bool:
    """Adopt leaves that were replaced or changed; return whether full leaves are new.

    The sharded form must be current, and no stream may use the old buffers. New full
    leaves have no hooks yet. Changes of ``requires_grad`` are left to
    ``follow_requires_grad``. Nothing is copied before all checks have passed.

    * A parameter that was replaced, cast, or moved from the CPU to a GPU: the new
      parameter is adopted and the region is rebuilt. Tied places are tied again, to the
      parameter that the first changed place shows.
    * A parameter whose ``.data`` only moved to other memory: the data is copied into
      the shard.

    Collective: none.
    Raises: PlanError, naming the parameter, if a parameter is on meta, has another
    shape, has another dtype than the other parameters of its region, was replaced by an
    object that is no parameter, or was moved away from the host although its shard is
    offloaded; or if gradients of ``no_sync`` wait to be reduced.
    """
    if shards_are_unchanged(handle):
        return False
    for parameters, name, leaf, full in handle.swaps:
        # ``torch.func.functional_call`` inside a forward of the unit found the full
        # leaf, and put the full leaf back after the unit had been resharded.
        if parameters.get(name) is full:
            parameters[name] = leaf
    if shards_are_unchanged(handle):
        return False
    names: dict[int, str] = {}
    current = _current(handle, names)
    _require_fit(handle, current, names)
    if not _is_replaced(handle, current):
        restore_shard_views(handle)
        return False
    if handle.reduction.due or handle.reduction.held is not None:
        raise PlanError(
            f"Parameters of unit {handle.name} were replaced, cast or moved while "
            "gradients of no_sync wait to be reduced. Change them between steps."
        )
    leaves = [
        tuple(current[slot.index] for slot in region.layout.parameters)
        for region in handle.layout.regions
    ]
    record_replaced(handle, leaves)
    rebuild_handle(handle, leaves, device=_device(handle, current))
    return True


def _current(handle: FlatParamHandle, names: dict[int, str]) -> dict[int, nn.Parameter]:
    """Return, by slot index, the parameter that the modules show; fill ``names``."""
    current: dict[int, nn.Parameter] = {}
    for info, (parameters, key, leaf, _) in zip(
        handle.infos, handle.swaps, strict=True
    ):
        fqn = names.setdefault(info.slot_index, join_name(handle.full_fqn, info.fqn))
        found = parameters.get(key)
        if not isinstance(found, nn.Parameter):
            raise PlanError(
                f"Parameter {quoted(fqn)} was removed or replaced by a "
                f"{type(found).__name__} after fully_shard (torch.func.functional_call "
                "does so for a while). Change modules before fully_shard."
            )
        first = current.setdefault(info.slot_index, found)
        # On meta, different objects are legal: ``to_empty`` creates a parameter for
        # each place.
        if found is not first and not leaf.is_meta:
            raise PlanError(
                f"The places of tied parameter {quoted(fqn)} show different parameters "
                "since fully_shard. Assign to all of them, or untie before fully_shard."
            )
        if first is leaf:
            current[info.slot_index] = found
    return current


def _require_fit(
    handle: FlatParamHandle, current: dict[int, nn.Parameter], names: dict[int, str]
) -> None:
    """Raise PlanError if a parameter in ``current`` cannot be a leaf of its region."""
    meta = [quoted(names[i]) for i, parameter in current.items() if parameter.is_meta]
    if meta:
        more = f" and {len(meta) - 3} more" if len(meta) > 3 else ""
        raise PlanError(
            f"Parameters {', '.join(meta[:3])}{more} are still on the meta device, so "
            "they have no values. Pass param_init_fn to fully_shard; or call "
            "model.to_empty(device=...) after it and initialise the shards, or load a "
            "state dict."
        )
    # Shape and dtype are compared with the sharded leaf, and dtypes within the region:
    # a region has a single dtype. The whole region may be cast.
    for region in handle.layout.regions:
        homes, _ = shard_views(region.cuts, region.shard)
        parameters = [current[slot.index] for slot in region.layout.parameters]
        for slot, home, found in zip(
            region.layout.parameters, homes, parameters, strict=True
        ):
            fqn = names[slot.index]
            if found.shape != home.shape or found.dtype != parameters[0].dtype:
                raise _misfit(fqn, home, found)
            if handle.layout.offload and found.device.type != "cpu":
                raise PlanError(
                    f"Parameter {quoted(fqn)} was moved to {found.device} after "
                    "fully_shard with cpu_offload, which keeps it on the host. Move "
                    "the model before fully_shard, or not at all: the compute device "
                    f"is {handle.layout.device}."
                )


def _is_replaced(handle: FlatParamHandle, current: dict[int, nn.Parameter]) -> bool:
    """Return whether an object, a dtype or a device changed, and not only memory."""
    return (
        handle.layout.on_meta
        or any(
            parameters.get(name) is not leaf
            for parameters, name, leaf, _ in handle.swaps
        )
        or any(
            leaf.dtype != region.shard.dtype or leaf.device != region.shard.device
            for region in handle.layout.regions
            for leaf in region.leaves
        )
    )


def _device(handle: FlatParamHandle, current: dict[int, nn.Parameter]) -> torch.device:
    """Return the compute device after the change."""
    devices = {parameter.device for parameter in current.values()}
    # A CPU is the compute device only because the parameters were on the CPU, so the
    # unit follows parameters that moved. A GPU was chosen and stays.
    if (
        handle.layout.device.type == "cpu"
        and len(devices) == 1
        and not handle.layout.offload
    ):
        return devices.pop()
    return handle.layout.device


@outside_transforms
def restore_shard_views(handle: FlatParamHandle) -> None:
    """Copy changed leaves into the shard and make all leaves views of the shard."""
    with torch.no_grad():
        for region in handle.layout.regions:
            homes, _ = shard_views(region.cuts, region.shard)
            for leaf, home in zip(region.leaves, homes, strict=True):
                if leaf.numel() and leaf.data_ptr() != home.data_ptr():
                    home.copy_(leaf.detach())
                leaf.data = own_memory(home)
    handle.memory = leaf_memory(handle.layout)


def _misfit(fqn: str, expected: torch.Tensor, got: torch.Tensor) -> PlanError:
    """Return the error for a parameter that does not fit its place in the shard."""
    return PlanError(
        f"Parameter {quoted(fqn)} was changed after fully_shard: its shard on this "
        "rank "
        f"is {tuple(expected.shape)} {expected.dtype} ({expected.numel()} elements), "
        f"found {tuple(got.shape)} {got.dtype}. Cast or replace parameters before "
        "fully_shard; inside unshard_params they can be written in place."
    )


def full_locations(handle: FlatParamHandle) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return each full leaf with the view of ``full`` that its data must be.

    ``full`` must have memory.
    """
    return [
        pair
        for region in handle.layout.regions
        for pair in zip(
            region.full.leaves,
            full_views(region.layout, region.full.buffer)[0],
            strict=True,
        )
    ]


def is_at(leaf: torch.Tensor, home: torch.Tensor) -> bool:
    """Return whether ``leaf`` is the same view of the same memory as ``home``."""
    # Strides too: a transposed view has the same address and, if square, the same
    # shape.
    return (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) == (
        home.data_ptr(),
        home.dtype,
        home.shape,
        home.stride(),
    )


def restore_full_views(handle: FlatParamHandle) -> None:
    """Make every full leaf whose ``.data`` was replaced a view of ``full`` again.

    The replaced data is lost, unless a caller has copied the data. ``full`` must have
    memory.
    """
    for leaf, home in full_locations(handle):
        if not is_at(leaf, home):
            leaf.data = home
