"""Tells which ranks of a model's meshes hold the same values, and which of them stores.

Tensor parallelism adds a dimension to the ranks of a model. Along the dimension, ranks
hold other rectangles of a parameter that is cut, and equal values of all others::

                      tp 0                   tp 1
    dp 0    up.weight rows 0-15     up.weight rows 16-31     norm.weight: stored by tp 0
    dp 1    ..                      ..

Before a save, the shards of replicas are compared by hashes: replicas that differ (a
write to one of them, another learning rate there) are seen by no collective, and the
checkpoint would be a mixture that no rank has.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError, PlanError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_form import ParamForm, groups_of
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import listed, quoted, ranks_text
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import (
    is_dtensor,
    local_of,
    refuse_cuts,
    whole_of,
)
from composable_fsdp.storage.manifest import Rectangle, rectangle_of
from composable_fsdp.tree.state import _FSDPState


def mesh_groups_in(
    module: nn.Module, handles: Iterable[FlatParamHandle]
) -> list[dist.ProcessGroup]:
    """Return the groups of the meshes of DTensors and experts, each set once."""
    # Units first: after ``fully_shard`` the modules show plain parameters, and the
    # forms of the units know the meshes.
    found = []
    for unit in handles:
        found += groups_of(unit.layout.forms)
        # Ranks with other experts are ranks of the model as well.
        if unit.groups.experts is not None:
            found.append(unit.groups.experts)
    for each in walk.modules(module):
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if is_dtensor(tensor):
                # Of every rank alike: all ranks have called parallelize_module.
                given: Any = tensor
                found += _groups_of_mesh(given.device_mesh)
    # Each slice of a mesh may have made a group of its own for the same ranks.
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group in found:
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return [group for ranks, group in by_ranks.items() if len(ranks) > 1]


def _groups_of_mesh(mesh: Any) -> list[dist.ProcessGroup]:
    """Return this rank's group of each dim; none for a rank outside of the mesh."""
    # The rank has no group there, and the tensor no element on the rank.
    if mesh.get_coordinate() is None:
        return []
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def is_first_copy(
    handle: FlatParamHandle,
    form: ParamForm | None,
    groups: Sequence[dist.ProcessGroup],
) -> bool:
    """Return whether this rank is the first of a replica with a part of a parameter."""
    # Without tensor parallelism nothing else is a copy.
    if not groups:
        return True
    me = dist.get_rank()
    return all(ranks[0] == me for ranks in copies_of(handle, form, groups))


def copies_of(
    handle: FlatParamHandle,
    form: ParamForm | None,
    groups: Sequence[dist.ProcessGroup],
) -> list[list[int]]:
    """Return the ranks along each dim of the meshes that copies of a parameter lie on.

    Without the replicas of the unit.
    """
    if not groups:
        return []
    me = dist.get_rank()
    # The ranks that hold other elements of the parameter: also ranks of experts, whose
    # mesh lies inside of the data ranks of the other units.
    others = {me}
    cut = () if form is None else form.cut_over
    for group in (*handle.groups.present, *handle.groups.cut, *cut):
        others.update(dist.get_process_group_ranks(group))
    found = map(dist.get_process_group_ranks, groups)
    return [ranks for ranks in found if others.isdisjoint(set(ranks) - {me})]


def is_first_part(handle: FlatParamHandle, form: ParamForm | None) -> bool:
    """Return whether this rank is the first of the ranks that divide a parameter."""
    cut = () if form is None else form.cut_over
    return handle.groups.rank == 0 and all(group.rank() == 0 for group in cut)


def loose_rectangle(tensor: Tensor, name: str, what: str) -> Rectangle | None:
    """Return this rank's rectangle of a DTensor in no unit; None for other tensors.

    Raises: CheckpointError, for placements that leave no rectangle on a rank.
    """
    if not is_dtensor(tensor):
        return None
    given: Any = tensor
    # The rule of ``fully_shard``, with the error of checkpoints: all ranks raise alike,
    # because all see the same placements.
    try:
        refuse_cuts(tensor, name, f"pass a module without the tensor to {what}")
    except PlanError as error:
        raise CheckpointError(f"{error} Nothing was done.") from None
    shape = tuple(given.shape)
    # A rank outside of the mesh has no elements.
    if given.device_mesh.get_coordinate() is None:
        return Rectangle(shape, (0,) * len(shape), (0,) * len(shape))
    place = whole_of(tensor)
    assert place is not None
    return rectangle_of(place, local_of(tensor).shape)


def stores_loose(tensor: Tensor, first_rank: int) -> bool:
    """Return whether this rank stores its rectangle of a DTensor in no unit."""
    given: Any = tensor
    mesh = given.device_mesh
    at = mesh.get_coordinate()
    # The other rows of the mesh hold copies of the whole tensor.
    if at is None or first_rank not in mesh.mesh.flatten().tolist():
        return False
    # With more ranks than rows, some hold nothing to store.
    if given.numel() and not local_of(tensor).numel():
        return False
    # An empty tensor has no rectangles to tell apart.
    return all(
        (placement.is_shard() and given.numel()) or not index
        for placement, index in zip(given.placements, at, strict=True)
    )


@torch.no_grad()
def whole_value(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, and of a DTensor those of all ranks.

    Collective: for a DTensor an all-gather over each dim of the mesh that cuts.
    """
    given: Any = tensor
    # A rank outside of the mesh has no group to gather over.
    if not is_dtensor(tensor) or given.device_mesh.get_coordinate() is None:
        return tensor.detach()
    whole: Tensor = given.full_tensor()
    return whole.detach()


def local_state(value: Tensor, parameter: Tensor, where: str) -> Tensor:
    """Return this rank's part of a state of a DTensor.

    Raises: CheckpointError, for a state that is placed otherwise.
    """
    # A step that all ranks count alike, or the state of a plain parameter.
    if not is_dtensor(value):
        return value
    given: Any = value
    own: Any = parameter
    alike = given.placements == own.placements and given.device_mesh == own.device_mesh
    if not is_dtensor(parameter) or not alike:
        raise CheckpointError(
            f"{quoted(where)} is a DTensor placed as {tuple(given.placements)}; "
            f"expected the placements of the parameter, {tuple(own.placements)}. "
            "Nothing was done. Redistribute the state, or keep plain tensors."
        )
    return local_of(value)


def digest_of(value: object) -> bytes:
    """Return a digest of a value of plain types."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


class ReplicaShards(NamedTuple):
    """What a rank tells of its shards that other ranks hold, too."""

    place: bytes
    """Equal on ranks that hold the same shards; empty without replicas."""
    digest: bytes
    """A digest of ``hashes``."""
    hashes: dict[str, int]
    """A hash of the shard of each parameter, by name."""
    is_strict: bool
    """Whether a unit has ``check_weights="error"``."""


def replica_shards(states: Iterable[_FSDPState]) -> ReplicaShards:
    """Hash the shards of units with replicas, unless ``check_weights`` is ``"off"``.

    One copy of all hashes per unit to the host.
    """
    places: list[Any] = []
    hashes: dict[str, int] = {}
    is_strict = False
    for state in states:
        handle = state.handle
        groups = handle.groups
        if not state.initial.is_checked or groups.replicas < 2:
            continue
        refs = list(param_refs(handle))
        # Ranks of another part, or with other experts, hold other values of the name.
        parts = [
            g.rank() for g in (*groups_of(handle.layout.forms), groups.experts) if g
        ]
        at = groups.shard.rank() if groups.shard is not None else 0
        places.append((handle.full_fqn, at, parts))
        # By parameter, and not by region, so that the message has a name. The names are
        # read each time, because an outer unit may be applied in between.
        names = [slot_path(handle, ref.slot) for ref in refs]
        values = hash_values([ref.leaf for ref in refs]).tolist()
        hashes.update(zip(names, values, strict=True))
        is_strict = is_strict or state.options.check_weights == "error"
    place = digest_of(places) if places else b""
    return ReplicaShards(place, digest_of(hashes), hashes, is_strict)


def replicas_differ(told: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether ranks of the same place have told different digests.

    ``told``: place and digest of each rank.
    """
    # A set of pairs: equal pairs of many ranks count once.
    places = Counter(place for place, _ in set(told))
    return any(place and count > 1 for place, count in places.items())


def warning_of(ranks: Sequence[int], told: Sequence[ReplicaShards]) -> str:
    """Return the text of a warning about replicas that differ.

    Raises: CheckpointError, with ``check_weights="error"``.
    """
    values: dict[tuple[str, bytes], dict[int, list[int]]] = {}
    for rank, each in zip(ranks, told, strict=True):
        for name, value in each.hashes.items():
            values.setdefault((name, each.place), {}).setdefault(value, []).append(rank)
    unlike = {key: found for key, found in values.items() if len(found) > 1}
    # In the order of the units, so that all ranks name the same parameter.
    (name, _), found = next(iter(unlike.items()))
    first, *others = map(ranks_text, found.values())
    names = dict.fromkeys(name for name, _ in unlike)
    more = f" (and {len(names) - 1} more parameters)" if len(names) > 1 else ""
    text = (
        f"Replicas differ: parameter {quoted(name)}{more} has other values on {first} "
        f"than on {listed(others)}, which hold the same part"
    )
    causes = (
        "A write to one replica, or a step with other options there, leads to this. "
        "Give all replicas the same values before the save: load the last "
        "checkpoint, or broadcast the parameters."
    )
    if any(each.is_strict for each in told):
        raise CheckpointError(f"{text}; nothing was written. {causes}")
    return (
        f"{text}. Each replica writes a share, so the checkpoint is a mixture that no "
        f"rank has. {causes} check_weights='error' refuses such a save, "
        "check_weights='off' compares nothing."
    )
