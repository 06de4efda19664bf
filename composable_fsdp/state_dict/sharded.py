"""SHARDED_STATE_DICT: tensors that know which part of the whole this rank holds.

A ``ShardedValue`` has the shape of the whole parameter and memory for this rank's part
alone: a copy, which the next step leaves as it is. torch.distributed.checkpoint asks it
for boxes, so a checkpoint is written and read without a tensor moving between ranks::

    weight (5, 4) on 2 ranks, shard_numel 12

    rank 0   shape (5, 4), local (3, 4)   box at (0, 0) of size (3, 4)
    rank 1   shape (5, 4), local (2, 4)   box at (3, 0) of size (2, 4)

It is not a tensor to compute with: whatever needs all of it raises ``TypeError``.
``to_local()`` and ``local_shards()`` give what is here, ``full_tensor()`` gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.access.gather import gather_part
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.boxes import Box, interval_boxes
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.state_dict import dcp_caller, dcp_items

Op = Callable[..., Any]


class ShardPlace(NamedTuple):
    """Which box of the whole a ``LocalShard`` is; names as in torch's ShardedTensor."""

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]


class LocalShard(NamedTuple):
    """A box of a sharded value that this rank holds, and where it lies in the whole."""

    tensor: Tensor
    metadata: ShardPlace


class GroupAndDevice:
    """Where the parts of a value can be gathered. Not pickled: it names a group."""

    __slots__ = ("device", "group")

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = None if group is None else GroupRef(group)
        self.device = device

    def __deepcopy__(self, memo: dict[int, object]) -> GroupAndDevice:
        return self


class ShardedValue(Tensor):
    """This rank's part of one parameter, or of one element-wise state of it.

    ``shape``, ``size()``, ``dtype`` and ``device`` are those of the whole; ``local``
    holds the elements ``[start, stop)`` of the flattened whole that this rank has, in
    the sharded parameter's shape.
    """

    # Ordinary attributes, because torch's stagers copy them one by one.
    local: Tensor
    offset: int
    """Where the parameter begins in its flat buffer."""
    shard_numel: int
    """Elements of the flat buffer per rank."""
    rank: int
    world_size: int
    home: GroupAndDevice | None
    """None once it was pickled."""
    not_alone: str = ""
    """Of what ``optimizer.state_dict()`` shows unasked: what it is, for the message
    that refuses to pickle it. A file of one rank would lose the parts of others."""

    def __new__(
        cls,
        local: Tensor,
        shape: tuple[int, ...],
        offset: int,
        shard_numel: int,
        rank: int,
        world_size: int,
        home: GroupAndDevice | None = None,
    ) -> ShardedValue:
        value: ShardedValue = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        value.local, value.offset, value.shard_numel = local, offset, shard_numel
        value.rank, value.world_size = rank, world_size
        value.home = home
        if home is None:
            # Unpickled, perhaps in a process that saves and has made no unit.
            dcp_caller.install()
        return value

    # No type is looked at before dispatch, which alone decides.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        act = _OPS.get(func.overloadpacket)
        if act is None:
            given = next(v for v in args_of(args, kwargs) if isinstance(v, cls))
            raise TypeError(_refusal(func, given))
        return act(func, *args, **(kwargs or {}))

    @property
    def start(self) -> int:
        """The first element of the flattened whole that ``local`` holds."""
        return self._interval(self.rank)[0]

    @property
    def stop(self) -> int:
        """One past the last one; ``start`` if this rank holds none."""
        return self.start + self.local.numel()

    @property
    def boxes(self) -> tuple[Box, ...]:
        """``local`` as rectangles of the whole: one if rows are not cut, or none."""
        return interval_boxes(tuple(self.shape), self.start, self.stop)

    def with_local(self, local: Tensor) -> ShardedValue:
        """The same part of another whole: ``local`` holds its elements."""
        return ShardedValue(
            local,
            tuple(self.shape),
            self.offset,
            self.shard_numel,
            self.rank,
            self.world_size,
            self.home,
        )

    def to_local(self) -> Tensor:
        """Return ``local``, this rank's elements; the same memory."""
        return self.local

    def local_shards(self) -> list[LocalShard]:
        """Return this rank's boxes as tensors of their own shape, views of ``local``.

        One, unless rows are cut; none where this rank holds nothing.
        """
        flat = self.local.reshape(-1)
        return [
            LocalShard(
                flat[box.start : box.stop].view(box.sizes),
                ShardPlace(tuple(box.offsets), tuple(box.sizes)),
            )
            for box in self.boxes
        ]

    def full_tensor(self) -> Tensor:
        """Return the whole, a new tensor on the value's device, on every rank.

        Collective: one broadcast over the shard group from each rank that holds
        elements; none if one rank holds all. All its ranks must call.
        Raises: CheckpointError, for a value that came from a file, another process or
        ``optimizer.state_dict()`` and is in several parts; PhaseError, if the group was
        destroyed.
        """
        shape = tuple(self.shape)
        if self.is_meta:
            return self.local.new_empty(shape)
        if self.world_size == 1:
            return self.local.clone().view(shape)
        if self.home is None or self.home.group is None:
            raise CheckpointError(
                f"full_tensor expects a value whose process group is known, got one of "
                f"shape {shape} that was pickled, with {describe(self)}, or that "
                "optimizer.state_dict() gave, which other ranks may not have. Give it "
                "to load_state_dict of a model or optimizer sharded alike, and take "
                "the state dict under StateDictType.FULL_STATE_DICT, that of an "
                "optimizer by optim_state_dict(model, optim)."
            )
        intervals = [self._interval(rank) for rank in range(self.world_size)]
        group, device = self.home.group.get(), self.home.device
        whole = gather_part(self.local, shape, intervals, group, device)
        return whole.to(self.device)

    def _interval(self, rank: int) -> tuple[int, int]:
        """Elements of the flattened whole that ``rank`` holds; may be empty."""
        low, numel = rank * self.shard_numel - self.offset, self.shape.numel()
        start = min(max(low, 0), numel)
        return start, min(max(low + self.shard_numel, 0), numel)

    def is_part_like(self, other: ShardedValue) -> bool:
        """Whether both are cut alike, on every rank and not just on this one."""
        return _cut(self) == _cut(other) and self.rank == other.rank

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return dcp_items.write_items(
            fqn, self.local, self.shape, self.boxes, world_size=self.world_size
        )

    def __create_chunk_list__(self) -> list[Any]:
        return dcp_items.chunks_to_load(self.boxes)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The box that begins at ``index.offset``, as a view of ``local``."""
        return dcp_items.view_at(self.local, self.boxes, index)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch has an option
        return (
            f"ShardedValue(shape={tuple(self.shape)}, dtype={self.dtype}, device="
            f"{str(self.device)!r}, {describe(self)}, local={self.local!r})"
        )

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self.not_alone:
            raise CheckpointError(
                f"optimizer.state_dict() holds this rank's part of {self.not_alone}, "
                f"{describe(self)}, and is pickled (torch.save, accelerate's "
                "save_state, Fabric's save); expected a whole tensor, because a file "
                "that one rank writes would lose the parts of the others. Pickle what "
                "optim_state_dict(model, optimizer) returns, called on all ranks; or "
                "use composable_fsdp.save, or torch.distributed.checkpoint, which take "
                "each rank's part. For a file of each rank, call "
                "set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT) before."
            )
        return (
            ShardedValue,
            (
                self.local,
                tuple(self.shape),
                self.offset,
                self.shard_numel,
                self.rank,
                self.world_size,
            ),
        )


def describe(value: ShardedValue) -> str:
    """Which part it is, in words."""
    return (
        f"elements [{value.start}, {value.stop}) of {value.shape.numel()} on rank "
        f"{value.rank} of {value.world_size}"
    )


def _cut(value: ShardedValue) -> tuple[object, ...]:
    return tuple(value.shape), value.offset, value.shard_numel, value.world_size


def args_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    """All arguments of an op, those in lists too."""
    flat: list[Any] = []
    for each in [*args, *(kwargs or {}).values()]:
        flat.extend(each if isinstance(each, (list, tuple)) else [each])
    return flat


def _refusal(func: object, value: ShardedValue) -> str:
    return (
        f"{func} expects a whole tensor of shape {tuple(value.shape)}, got a "
        f"ShardedValue with {describe(value)}. Use value.local for this rank's "
        "elements and value.full_tensor() on all ranks for the whole; take the state "
        "dict under StateDictType.FULL_STATE_DICT for whole tensors; "
        "torch.distributed.checkpoint saves and loads the value as it is."
    )


def _on_local(func: Op, value: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    return value.with_local(func(value.local, *args, **kwargs))


def _new_empty(func: Op, value: ShardedValue, size: Any, **kwargs: Any) -> Tensor:
    if tuple(size) == tuple(value.shape):
        return value.with_local(func(value.local, value.local.shape, **kwargs))
    made: Tensor = func(value.local, size, **kwargs)
    return made


def _copy(func: Op, to: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    plain = isinstance(to, ShardedValue) and type(source) is Tensor
    if plain and source.shape == to.local.shape:
        # This rank's part, as optimizers that load in place give it.
        func(to.local, source, *args, **kwargs)
        return to
    if not (isinstance(to, ShardedValue) and isinstance(source, ShardedValue)):
        given = to if isinstance(to, ShardedValue) else source
        text = _refusal(func, given)
        if not given.shape:
            # One number, and only one rank has it: no other could save it instead.
            text += (
                " If this is async_save with a storage_writer, pass checkpoint_id "
                "instead: the writer's own stager makes a plain tensor of a parameter "
                "without dimensions."
            )
        raise TypeError(text)
    if not to.is_part_like(source):
        raise TypeError(
            f"{func} expects another ShardedValue with {describe(to)} of shape "
            f"{tuple(to.shape)}, got {describe(source)} of shape "
            f"{tuple(source.shape)}. Use torch.distributed.checkpoint to go from one "
            "way of sharding to another."
        )
    func(to.local, source.local, *args, **kwargs)
    return to


_aten = torch.ops.aten
_OPS: dict[Any, Callable[..., Any]] = {
    # What moves a state dict about, and what torch's stagers ask for.
    _aten.detach: _on_local,
    _aten.clone: _on_local,
    _aten._to_copy: _on_local,
    _aten.empty_like: _on_local,
    _aten.zeros_like: _on_local,
    _aten.new_empty: _new_empty,
    _aten.copy_: _copy,
}


def sharded_value(
    handle: FlatParamHandle, region: FlatParameter, slot: ParameterSlot, local: Tensor
) -> Tensor:
    """``local``, this rank's part of the parameter in ``slot``, as a sharded value.

    So is a whole one on a rank that holds everything: a load then looks for holes. A
    parameter without elements, which no box could tell of, is a plain tensor, and so is
    a number that this rank has.
    """
    if not slot.numel:
        return local.new_empty(slot.shape)
    if handle.groups.shard is None and not slot.shape:
        return local
    return ShardedValue(
        local,
        slot.shape,
        slot.offset,
        region.layout.shard_numel,
        region.rank,
        region.layout.world_size,
        GroupAndDevice(handle.groups.shard, handle.device),
    )


def sharded_values(handle: FlatParamHandle, *, to_cpu: bool) -> dict[int, Tensor]:
    """Copies of this rank's part of the unit's parameters, by slot index."""
    return {
        slot.index: sharded_value(handle, region, slot, copied(leaf, to_cpu=to_cpu))
        for region in handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
    }


def copied(value: Tensor, *, to_cpu: bool) -> Tensor:
    """A tensor of its own with these values, on the host or where they are."""
    return value.detach().to("cpu" if to_cpu else value.device, copy=True)


def mismatch(
    handle: FlatParamHandle,
    region: FlatParameter,
    slot: ParameterSlot,
    value: ShardedValue,
) -> str:
    """Say why ``value`` is no part of ``slot`` as this rank has it; empty if it is.

    All ranks find the same, unless one rank's values were given to another.
    """
    own = sharded_value(handle, region, slot, value.local)
    if isinstance(own, ShardedValue) and own.is_part_like(value):
        return ""
    start, stop = region.layout.interval(slot, region.rank)
    return (
        f"expected elements [{start}, {stop}) of shape {slot.shape} on rank "
        f"{region.rank} of {region.layout.world_size}, got {describe(value)} of shape "
        f"{tuple(value.shape)}, cut at multiples of {value.shard_numel} in a buffer "
        f"where it begins at {value.offset}. Sharded values go back as they came: "
        "save them with torch.distributed.checkpoint and load that into this model's "
        "own state_dict(), or save under FULL_STATE_DICT."
    )


# To rebuild one is to make a tensor: ``torch.load(weights_only=True)`` may.
torch.serialization.add_safe_globals([ShardedValue])
