"""SHARDED_STATE_DICT: tensors that know which part of the full value this rank holds.

torch.distributed.checkpoint (DCP) asks a ``ShardedValue`` for boxes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import composable_fsdp.state_dict.dcp_caller as dcp
from composable_fsdp.access.gather import gather_part
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.param_form import ParamForm
from composable_fsdp.planning.partition import Box, interval_boxes, moved

Op = Callable[..., Any]

SHOWN: weakref.WeakSet[Any] = weakref.WeakSet()
"""What units show in place of their parameters now, so that hooks of users may run."""

Within = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape and offset of a rectangle, and the number of rectangles of the full value."""


class ShardPlace(NamedTuple):
    """The box of a local shard; field names as in torch's ShardedTensor."""

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]


class LocalShard(NamedTuple):
    """A box of a sharded value on this rank, and its place in the full value."""

    tensor: Tensor
    metadata: ShardPlace


@dataclass(frozen=True, slots=True)
class Home:
    """Where ``full_tensor`` gathers; not pickled with the value."""

    group: GroupRef | None
    device: torch.device
    form: ParamForm

    def __deepcopy__(self, memo: dict[int, object]) -> Home:
        return self


class ShardedValue(Tensor):
    """This rank's part of a parameter, or of element-wise optimizer state.

    ``shape``, ``size()``, ``dtype`` and ``device`` describe the full value; ``local``
    holds this rank's elements ``[start, stop)`` of the flattened full value: the memory
    of the shard where DCP or FSDP2's door asks, and a copy under ``state_dict_type``.

    Element-wise operators of equally cut values and numbers work on these elements.
    Operators that need the full value raise ``TypeError``, but gather in hooks.
    """

    # Ordinary attributes, because torch's stagers copy each attribute.
    local: Tensor
    offset: int
    """The first element of the parameter in the flat buffer."""
    shard_numel: int
    """Elements of the flat buffer per rank."""
    rank: int
    world_size: int
    home: Home | None
    """The group and device for ``full_tensor``; None after unpickling, and for values
    of ``optimizer.state_dict()``.
    """
    within: Within | None = None
    """Of a parameter that tensor parallelism cuts, this rank's rectangle, which
    ``offset``, ``shard_numel``, ``start`` and ``stop`` are of then."""
    not_alone: str = ""
    """Description of a value in ``optimizer.state_dict()``: pickling raises, because a
    file of a single rank would lose the other parts."""

    def __new__(
        cls,
        local: Tensor,
        shape: tuple[int, ...],
        offset: int,
        shard_numel: int,
        rank: int,
        world_size: int,
        home: Home | None = None,
        within: Within | None = None,
    ) -> ShardedValue:
        value: ShardedValue = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        value.local, value.offset, value.shard_numel = local, offset, shard_numel
        value.rank, value.world_size = rank, world_size
        value.home, value.within = home, within
        # Unpickled, perhaps in a process that saves without having made a unit.
        if home is None:
            dcp.install()
        return value

    # All decisions are made in __torch_dispatch__, so skip the dispatch before.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operators of ``_OPS``. Raises: TypeError, for others."""
        act = _OPS.get(func.overloadpacket)
        # Not the operators of lists, ``torch._foreach_*``.
        if act is None and torch.Tag.pointwise in func.tags:
            act = _elementwise
        # Any other operator would take this rank's part for the full value.
        if act is None and (func._schema.is_mutable or not SHOWN):
            given = next(v for v in tree_leaves((args, kwargs)) if isinstance(v, cls))
            raise TypeError(_refusal(func, given))
        return (act or _on_whole)(func, *args, **(kwargs or {}))

    __hash__ = Tensor.__hash__

    def __eq__(self, other: object) -> Any:
        """Compare element by element. Raises: TypeError, for another cut."""
        is_number = isinstance(other, (Tensor, int, float))
        return torch.eq(self, other) if is_number else NotImplemented  # type: ignore[call-overload]

    @property
    def start(self) -> int:
        """The first element of the flattened full value that ``local`` holds."""
        return self._interval(self.rank)[0]

    @property
    def stop(self) -> int:
        """The end of ``local``'s elements; ``start`` if this rank holds none."""
        return self.start + self.local.numel()

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Return ``local`` as rectangles of the full value; one if no row is cut."""
        found = interval_boxes(self._inner, self.start, self.stop)
        return found if self.within is None else moved(found, self.within[1])

    def with_local(self, local: Tensor) -> ShardedValue:
        """Return the same part of another full value, with the elements ``local``."""
        return ShardedValue(local, *self._cut, self.home, self.within)

    @property
    def _cut(self) -> tuple[tuple[int, ...], int, int, int, int]:
        """The facts that say how all ranks cut the value, and this rank."""
        cut = self.offset, self.shard_numel, self.rank, self.world_size
        return (tuple(self.shape), *cut)

    def to_local(self) -> Tensor:
        """Return ``local``, this rank's elements; the same memory."""
        return self.local

    def local_shards(self) -> list[LocalShard]:
        """Return this rank's boxes as views of ``local``, in their own shapes."""
        flat = self.local.reshape(-1)
        return [
            LocalShard(
                flat[box.start : box.stop].view(box.sizes),
                ShardPlace(tuple(box.offsets), tuple(box.sizes)),
            )
            for box in self.boxes
        ]

    def full_tensor(self) -> Tensor:
        """Return the full value on every rank, a new tensor on the value's device.

        Collective: over the shard group a broadcast from each rank that holds elements;
            none if a single rank holds all. All its ranks must call.
        Raises: CheckpointError, for a value in several parts that came from a file,
            another process or ``optimizer.state_dict()``; PhaseError, if the group was
            destroyed.
        """
        shape = tuple(self.shape)
        # A value on meta has nothing to gather.
        if self.is_meta:
            return self.local.new_empty(shape)
        home, is_cut = self.home, self.within is not None
        if self.world_size == 1 and not is_cut:
            return self.local.clone().view(shape)
        if home is None or (home.group is None and self.world_size > 1):
            raise CheckpointError(
                f"full_tensor expects a value whose process group is known, got one of "
                f"shape {shape} that was pickled, with {describe(self)}, or that "
                "optimizer.state_dict() gave, which other ranks may not have. Give it "
                "to load_state_dict of a model or optimizer sharded alike, and take "
                "the state dict under StateDictType.FULL_STATE_DICT, that of an "
                "optimizer by optim_state_dict(model, optim)."
            )
        # All ranks compute all intervals from the same cut.
        intervals = [self._interval(rank) for rank in range(self.world_size)]
        group = None if home.group is None else home.group.get()
        whole = gather_part(self.local, self._inner, intervals, group, home.device)
        # The rectangles lie side by side on the ranks of tensor parallelism. The
        # backend sent from the compute device; the value may be in host memory.
        return home.form.whole(whole).to(self.device)

    def _interval(self, rank: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of the full value on ``rank``."""
        # The rank's interval of the flat buffer, shifted by the parameter's offset and
        # clipped to the parameter.
        low, numel = rank * self.shard_numel - self.offset, prod(self._inner)
        start = min(max(low, 0), numel)
        return start, min(max(low + self.shard_numel, 0), numel)

    @property
    def _inner(self) -> tuple[int, ...]:
        """The shape of what the ranks of the shard group hold together."""
        return tuple(self.shape) if self.within is None else self.within[0]

    @property
    def is_partial(self) -> bool:
        """Whether other ranks hold other parts of the full value."""
        return self.world_size > 1 or self.within is not None

    def is_part_like(self, other: ShardedValue) -> bool:
        """Return whether both values are cut alike, on every rank."""
        return self._cut == other._cut and self.within == other.within

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        """Return DCP's write items for the boxes."""
        parts = self.world_size * (1 if self.within is None else self.within[2])
        return dcp.write_items(fqn, self.local, self.shape, self.boxes, parts=parts)

    def __create_chunk_list__(self) -> list[Any]:
        """Return DCP's chunks to load for the boxes."""
        # DCP writes to ranks with elements alone, and does not count.
        _count_write(self)
        return dcp.CheckedChunks(self.boxes)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the box at ``index.offset``, as a view of ``local``; for DCP."""
        # Offsets identify a box, as in the write items.
        wanted = () if index.offset is None else tuple(index.offset)
        for shard in self.local_shards():
            if shard.metadata.shard_offsets == wanted:
                return shard.tensor
        raise CheckpointError(
            f"{index.fqn!r} was asked for its box at {wanted}, but this rank holds "
            f"boxes at {[box.offsets for box in self.boxes]}. Plan and read with the "
            "same state dict."
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch has an option
        return (
            f"ShardedValue(shape={tuple(self.shape)}, dtype={self.dtype}, device="
            f"{str(self.device)!r}, {describe(self)}, local={self.local!r})"
        )

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle without the process group."""
        if self.not_alone:
            raise CheckpointError(
                f"optimizer.state_dict() holds this rank's part of {self.not_alone}, "
                f"{describe(self)}, and is pickled; expected a whole tensor, because a "
                "file of one rank would lose the parts of the others. Pickle what "
                "optim_state_dict(model, optimizer) returns, called on all ranks; or "
                "use composable_fsdp.save. For a file of each rank, call "
                "set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT) before."
            )
        within = () if self.within is None else (None, self.within)
        return ShardedValue, (self.local, *self._cut, *within)


def describe(value: ShardedValue) -> str:
    """Describe the part in words."""
    place = ""
    if value.within is not None:
        place = f", of the rectangle {value.within[0]} at {value.within[1]}"
    return (
        f"elements [{value.start}, {value.stop}) of {prod(value._inner)} on rank "
        f"{value.rank} of {value.world_size}{place}"
    )


def local_of(value: Any) -> Any:
    """Return the elements of a sharded value; any other value as it is."""
    return value.local if isinstance(value, ShardedValue) else value


def _refusal(func: object, value: ShardedValue) -> str:
    """Return the error text for an operator that needs the full value."""
    return (
        f"{func} expects a whole tensor of shape {tuple(value.shape)}, got a "
        f"ShardedValue with {describe(value)}. Use value.local for this rank's "
        "elements and value.full_tensor() on all ranks for the whole; take the state "
        "dict under StateDictType.FULL_STATE_DICT for whole tensors; "
        "torch.distributed.checkpoint saves and loads the value as it is."
    )


def _on_local(func: Op, value: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    """Apply an operator to ``local``."""
    return value.with_local(func(value.local, *args, **kwargs))


def _new_empty(func: Op, value: ShardedValue, size: Any, **kwargs: Any) -> Tensor:
    """Return a new value of the same cut, or a plain tensor for another size."""
    # The value's own size asks for another value of the same cut.
    if tuple(size) == tuple(value.shape):
        return value.with_local(func(value.local, value.local.shape, **kwargs))
    made: Tensor = func(value.local, size, **kwargs)
    return made


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator to parts that are cut alike. Raises: TypeError, for others."""
    given: list[Any] = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    value = next(v for v in given if isinstance(v, ShardedValue))
    for each in given:
        is_sharded = isinstance(each, ShardedValue)
        if not (value.is_part_like(each) if is_sharded else not each.dim()):
            what = describe(each) if is_sharded else "a plain tensor"
            raise TypeError(
                f"{_refusal(func, value)} Element-wise operators combine it with "
                f"numbers and values of the same cut, got {what} of shape "
                f"{tuple(each.shape)}."
            )
    result = func(*map(local_of, args), **tree_map(local_of, kwargs))
    if not func._schema.is_mutable:
        return value.with_local(result)
    _count_write(value)
    return args[0]


def _on_whole(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator to full values. Collective: as ``full_tensor``, per value."""

    args, kwargs = tree_map_only(ShardedValue, ShardedValue.full_tensor, (args, kwargs))
    return func(*args, **kwargs)


def _copy(func: Op, to: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy between values of the same cut, or from this rank's plain part."""
    is_sharded = isinstance(to, ShardedValue) and isinstance(source, ShardedValue)
    # Under another cut the same positions hold other elements.
    if is_sharded and not to.is_part_like(source):
        raise TypeError(
            f"{func} expects another ShardedValue with {describe(to)} of shape "
            f"{tuple(to.shape)}, got {describe(source)} of shape "
            f"{tuple(source.shape)}. Use torch.distributed.checkpoint to go from one "
            "way of sharding to another."
        )
    part = source.local if is_sharded else None
    if isinstance(to, ShardedValue) and not isinstance(source, ShardedValue):
        # Optimizers that load in place pass this rank's part.
        if source.shape == to.local.shape:
            part = source
        # A state dict or a load hook has a full value, which torch copies into the
        # parameter shown.
        elif SHOWN and source.shape == to.shape:
            whole = source if to.home is None else to.home.form.part(source)
            part = whole.reshape(-1)[to.start : to.stop].view(to.local.shape)
    if part is None:
        raise TypeError(_refusal(func, to if isinstance(to, ShardedValue) else source))
    func(to.local, part, *args, **kwargs)
    if isinstance(to, ShardedValue):
        _count_write(to)
    return to


def _count_write(value: ShardedValue) -> None:
    """Tell units that keep full values of a write, also on ranks without elements."""
    # Operators inside of ``__torch_dispatch__`` do not count.
    if not value.local.is_inference():
        torch.autograd.graph.increment_version(value.local)


def _detached(func: Op, value: ShardedValue) -> ShardedValue:
    """Return a value over the same ``local``, which counts versions of the shard."""
    return value.with_local(value.local)


_aten = torch.ops.aten
# Operators that move a state dict, and operators that torch's stagers call.
_OPS: dict[Any, Callable[..., Any]] = {
    _aten.detach: _detached,
    _aten.clone: _on_local,
    _aten._to_copy: _on_local,
    _aten.empty_like: _on_local,
    _aten.zeros_like: _on_local,
    _aten.new_empty: _new_empty,
    _aten.zero_: _elementwise,
    _aten.fill_: _elementwise,
    _aten.copy_: _copy,
    # A single answer, which has to be that of all ranks.
    _aten.equal: _on_whole,
    _aten.allclose: _on_whole,
}
