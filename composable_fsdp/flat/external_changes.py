"""Finding leaves that something tore out of their shard since build.

``module.to(dtype)``, ``to_empty``, ``load_state_dict(assign=True)`` or an assignment
gives a module parameters with memory of their own; training on would read the old
values. Checked once per iteration, for a tenth of a microsecond a leaf.

What is found is taken up as plain modules take it: the parameter that a module shows is
the parameter, with its dtype. So an optimizer made after the change holds the right
objects.
"""

from __future__ import annotations

import torch
from torch import nn

from composable_fsdp.errors import PlanError
from composable_fsdp.flat.build import note_memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.rebuild import rebuild_handle
from composable_fsdp.flat.region import full_views, own_memory, shard_views
from composable_fsdp.flat.replaced import record_replaced
from composable_fsdp.naming import join_name, quoted


def shards_are_unchanged(handle: FlatParamHandle) -> bool:
    """Whether every leaf is in its place, and its data in the shard.

    The sharded form must be current. Of a leaf without elements on this rank, whose
    data has no address, the storage is compared: what a program does to all ranks'
    parameters is noticed on all ranks, whatever each holds.
    """
    for parameters, name, leaf, full in zip(  # the property, without its call
        handle.tables,
        handle.keys,
        handle.sharded_placed,
        handle.full_placed,
        strict=True,
    ):
        if (
            parameters.get(name) is not leaf
            or leaf.requires_grad is not full.requires_grad
        ):
            return False
    for leaf, pointer in zip(handle.here, handle.here_at, strict=True):
        if leaf.data_ptr() != pointer:
            return False
    for leaf, memory in zip(handle.absent, handle.absent_in, strict=True):
        if leaf.untyped_storage() is not memory:
            return False
    return not handle.on_meta


def leaves_view_shards(handle: FlatParamHandle) -> bool:
    """Whether the leaves with elements are views of the shard, not of its address only.

    ``leaf.data = torch.from_numpy(leaf.data.numpy())`` keeps the address. For a unit
    that is kept full: there, a leaf that has other data leads to an all-gather, so all
    ranks have to see it, and those without elements see another storage.
    """
    for region in handle.regions:
        memory = region.shard.untyped_storage()
        for leaf in region.leaves:
            if leaf.numel() and leaf.untyped_storage() is not memory:
                return False
    return True


def requires_grad_changed(handle: FlatParamHandle) -> bool:
    """Whether ``requires_grad`` of a leaf is not what its region has."""
    return any(
        leaf.requires_grad is not full.requires_grad for *_, leaf, full in handle.swaps
    )


def require_leaves(handle: FlatParamHandle) -> bool:
    """Take up leaves that were torn out; returns whether the full leaves are new ones.

    Those have no hooks yet. The sharded form must be current, and no stream may use the
    old buffers. Everything is checked before anything is copied. Sends nothing.

    A parameter that was replaced, cast or moved to a GPU from the CPU is the parameter
    from now on, and its region is made anew; places that were tied are tied again, to
    what the first changed one of them shows. One that only has other memory is copied.

    ``requires_grad`` is left for ``follow_requires_grad``.

    Raises: PlanError, naming the parameter: it is on meta, has another shape or a dtype
    of its own in its region, is no parameter, or was moved away from the host of its
    offloaded shard.
    """
    if shards_are_unchanged(handle):
        return False
    for parameters, name, leaf, full in handle.swaps:
        if parameters.get(name) is full:
            # torch.func.functional_call was called in a forward of the unit, and put
            # back what it had found when the unit was sharded again.
            parameters[name] = leaf
    if shards_are_unchanged(handle):
        return False
    names: dict[int, str] = {}
    current = _current(handle, names)
    _require_fit(handle, current, names)
    if not _is_replaced(handle, current):
        restore_shard_views(handle)
        return False
    if handle.reduce_due or handle.held is not None:
        raise PlanError(
            f"Parameters of unit {handle.name} were replaced, cast or moved while "
            "gradients of no_sync wait to be reduced. Change them between steps."
        )
    leaves = [
        tuple(current[slot.index] for slot in region.layout.parameters)
        for region in handle.regions
    ]
    record_replaced(handle, leaves)
    rebuild_handle(handle, leaves, device=_device(handle, current))
    return True


def _current(handle: FlatParamHandle, names: dict[int, str]) -> dict[int, nn.Parameter]:
    """By slot index, the parameter that the modules show; fills in the names."""
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
        if found is not first and not leaf.is_meta:
            # On meta, to_empty gives each place a parameter of its own.
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
    meta = [quoted(names[i]) for i, parameter in current.items() if parameter.is_meta]
    if meta:
        more = f" and {len(meta) - 3} more" if len(meta) > 3 else ""
        raise PlanError(
            f"Parameters {', '.join(meta[:3])}{more} are still on the meta device, so "
            "they have no values. Pass param_init_fn to fully_shard; or call "
            "model.to_empty(device=...) after it and initialise the shards, or load a "
            "state dict."
        )
    for region in handle.regions:
        homes, _ = shard_views(region, region.shard, rows=handle.rows)
        parameters = [current[slot.index] for slot in region.layout.parameters]
        for slot, home, found in zip(
            region.layout.parameters, homes, parameters, strict=True
        ):
            fqn = names[slot.index]
            if found.shape != home.shape or found.dtype != parameters[0].dtype:
                raise _misfit(fqn, home, found)
            if handle.offload and found.device.type != "cpu":
                raise PlanError(
                    f"Parameter {quoted(fqn)} was moved to {found.device} after "
                    "fully_shard with cpu_offload, which keeps it on the host. Move "
                    "the model before fully_shard, or not at all: the compute device "
                    f"is {handle.device}."
                )


def _is_replaced(handle: FlatParamHandle, current: dict[int, nn.Parameter]) -> bool:
    """Whether more has changed than the memory of leaves."""
    return (
        handle.on_meta
        or any(
            parameters.get(name) is not leaf
            for parameters, name, leaf, _ in handle.swaps
        )
        or any(
            leaf.dtype != region.shard.dtype or leaf.device != region.shard.device
            for region in handle.regions
            for leaf in region.leaves
        )
    )


def _device(handle: FlatParamHandle, current: dict[int, nn.Parameter]) -> torch.device:
    """Where the unit computes from now on: a CPU was only where the parameters were."""
    devices = {parameter.device for parameter in current.values()}
    if handle.device.type == "cpu" and len(devices) == 1 and not handle.offload:
        return devices.pop()
    return handle.device


def restore_shard_views(handle: FlatParamHandle) -> None:
    """Copy leaves with memory of their own into the shard and make them views again."""
    with torch.no_grad():
        for region in handle.regions:
            homes, _ = shard_views(region, region.shard, rows=handle.rows)
            for leaf, home in zip(region.leaves, homes, strict=True):
                if leaf.numel() and leaf.data_ptr() != home.data_ptr():
                    home.copy_(leaf.detach())
                leaf.data = own_memory(home)
    note_memory(handle)


def _misfit(fqn: str, expected: torch.Tensor, got: torch.Tensor) -> PlanError:
    return PlanError(
        f"Parameter {quoted(fqn)} was changed after fully_shard: its shard on this "
        "rank "
        f"is {tuple(expected.shape)} {expected.dtype} ({expected.numel()} elements), "
        f"found {tuple(got.shape)} {got.dtype}. Cast or replace parameters before "
        "fully_shard; inside unshard_params they can be written in place."
    )


def full_locations(handle: FlatParamHandle) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each full leaf, and the view of ``full`` that its data has to be.

    ``full`` must have its memory.
    """
    return [
        pair
        for region in handle.regions
        for pair in zip(
            region.full_leaves, full_views(region.layout, region.full)[0], strict=True
        )
    ]


def is_at(leaf: torch.Tensor, home: torch.Tensor) -> bool:
    """Whether ``leaf`` is the same view of the same memory as ``home``."""
    return (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) == (
        home.data_ptr(),
        home.dtype,
        home.shape,
        home.stride(),
    )


def restore_full_views(handle: FlatParamHandle) -> None:
    """Make full leaves whose ``.data`` was replaced views of ``full`` again.

    What they held is lost, unless it was copied before. ``full`` must have its memory.
    """
    for leaf, home in full_locations(handle):
        if not is_at(leaf, home):
            leaf.data = home
