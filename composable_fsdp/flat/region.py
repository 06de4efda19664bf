"""A region of a unit: flat buffers, and the leaves that view the buffers.

::

    buffer          shape            has memory           viewed by
    shard           (shard_numel,)   always               sharded leaves (originals)
    full.buffer     (padded_numel,)  while unsharded      full leaves (for compute)
    reduce.buffer   (padded_numel,)  during backward      gradients before reduction
    gradient.shard  (shard_numel,)   until grads cleared  ``.grad`` of sharded leaves

The views of ``shard``, ``full`` and ``reduce`` are created once, at build. The views of
``gradient`` are created together with ``gradient.shard`` (``flat.gradients``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.flat.reduce_rule import NO_DIVISION, Division
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout, ShardCuts

# Readers of an attribute for loops in C, without a Python-level call for each tensor.
grad_of = attrgetter("grad")
post_hooks_of = attrgetter("_post_accumulate_grad_hooks")


@dataclass(slots=True, eq=False)
class WireBuffer:
    """The encoded values of a region; has memory from the encoding to the decoding."""

    buffer: Tensor
    """Bytes of all ranks in rank order, uint8."""
    own: Tensor
    """This rank's slice of ``buffer``."""


class FullBuffer(NamedTuple):
    """The full values of a region in the compute dtype. Replaced as a whole."""

    buffer: Tensor
    """``(padded_numel,)``: the shards of all ranks, in rank order."""
    own_slice: Tensor | None
    """This rank's slice ``(shard_numel,)`` of ``buffer``, if the shard must be copied
    there before the all-gather; ``None`` if the all-gather reads ``shard``."""
    is_own: bool
    """Whether ``buffer`` is a buffer of its own. If not, ``buffer`` is ``shard``."""
    leaves: tuple[nn.Parameter, ...]
    """The full leaves, aligned with ``FlatParameter.leaves``."""
    wire: WireBuffer | None = None
    """What the all-gather fills in place of ``buffer``, with a wire format."""


def no_owner() -> None:
    """Return the state of a region that has no hooks yet, or is in no unit: None."""


@dataclass(slots=True, eq=False)
class FlatGradient:
    """The reduced gradient of a region (``flat.gradients``)."""

    dtype: torch.dtype
    """Dtype of ``shard`` (``Dtypes.gradient``)."""
    shown: bytes
    """Per parameter, 1 if its view of ``shard`` was set as ``.grad``, so that a user
    may hold the view."""
    unshown: bytes
    """The initial value of ``shown``, zeros."""
    keeps_empty: bool = False
    """As ``ReduceRule.keeps_empty``."""
    shard: Tensor | None = None
    """The reduced gradient of this rank's elements; ``None`` before the first
    reduction, and once the cleared ``.grad`` of all leaves was noticed."""
    views: tuple[Tensor | None, ...] = ()
    """``.grad`` of each leaf: a view of ``shard``; ``None`` for an absent one."""


@dataclass(slots=True, eq=False)
class ReduceBuffer:
    """The unreduced gradients of a trainable region, and their reduction."""

    buffer: Tensor
    """Unreduced gradients ``(padded_numel,)``."""
    views: tuple[Tensor, ...]
    """The view of each parameter's gradient in ``buffer``."""
    gaps: tuple[Tensor, ...]
    """Views of the padding in ``buffer``."""
    arrived: bytearray
    """Per parameter: 1 if a gradient has arrived that was not reduced yet."""
    waiting: list[Tensor | None]
    """Per parameter: autograd's gradient, until the copy into ``buffer``."""
    # ``Any``: the class is in ``flat.handle``.
    progress: Any = None
    """The ``BackwardProgress`` of the graph task whose gradients are as usual: each was
    announced, is a plain tensor, and will be reduced; else None."""
    owner: Callable[[], Any] = no_owner
    """Weak reference to the unit's state, for the hooks of the full leaves."""
    division: Division = NO_DIVISION
    """How sums over ranks become averages (``flat.build.set_divisions``)."""
    has_tensor_hooks: bool = False
    """Whether a tensor hook of the user must see a gradient of this reduction."""
    partial: Tensor | None = None
    """``(shard_numel,)`` in the reduce dtype: sums over the shard group that wait for
    the all-reduce over the replicate group; ``None`` if none wait."""
    temporary: Tensor | None = None
    """Output of a reduction that cannot write into the flat gradient."""


class Referable:
    """A base for dataclasses with slots, of which weak references are made."""

    # Before Python 3.11 a dataclass makes no such slot by itself.
    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False, repr=False)
class FlatParameter(Referable):
    """A region at run time. Created by ``build_region``."""

    layout: RegionLayout
    leaves: tuple[nn.Parameter, ...]
    """The sharded leaves: the original parameters, in memory order."""
    shard: Tensor
    full: FullBuffer
    gradient: FlatGradient
    rank: int
    """This rank's index in the shard group."""
    cuts: ShardCuts
    """How ``shard`` and the flat gradient are cut into parts and padding."""
    device: torch.device
    """The device of the full buffer and the reduce buffer."""
    offload: bool
    """Whether ``shard`` and the flat gradient are in host memory."""
    graded: tuple[nn.Parameter, ...]
    """The leaves, and ``flat`` if set: ``.grad`` may show the flat gradient."""
    show: Callable[[Any, Tensor | None, bytes], list[nn.Parameter]]
    """Gives reduced gradients to the leaves (``gradients.show_on_leaves``) or to
    ``flat`` (``gradients.show_on_flat``)."""
    flat: nn.Parameter | None = None
    """``shard`` as a single parameter (``flat_parameter``), whose ``.grad`` is the
    flat gradient; the leaves have no ``.grad`` then."""
    host_copies: list[tuple[Tensor | None, bytes, bool]] = field(default_factory=list)
    """Offloaded units only: sums that are being copied to the host (None: into the
    flat gradient); per parameter, 1 if it shows them; and whether they are new."""
    holders: tuple[nn.Parameter, ...] = field(init=False)
    """Those of ``graded`` with elements on this rank."""

    def __post_init__(self) -> None:
        held = zip(self.leaves, self.cuts.places, strict=True)
        self.holders = tuple([leaf for leaf, place in held if place is not None])

    @property
    def absent(self) -> tuple[int, ...]:
        """Indices of leaves whose elements are all on other ranks."""
        return self.cuts.absent

    @property
    def is_exact(self) -> bool:
        """Whether ``full`` holds the values of the shards, neither cast nor encoded."""
        return self.full.wire is None and self.full.buffer.dtype == self.layout.dtype

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"FlatParameter({len(self.leaves)} parameters, {layout.dtype}, numel "
            f"{layout.numel}, padded_numel {layout.padded_numel}, shard_numel "
            f"{layout.shard_numel}, rank {self.rank})"
        )


@dataclass(slots=True, eq=False, repr=False)
class TrainableRegion(FlatParameter):
    """A region whose parameters get gradients."""

    reduce: ReduceBuffer = field(init=False)


def part_of(
    region: FlatParameter, slot: ParameterSlot, value: Tensor, *, like: Tensor
) -> Tensor:
    """Return this rank's part of the full ``value``, in the shape of ``like``."""
    # A rank without elements gets an empty interval, and so an empty view.
    start, stop = region.layout.interval(slot, region.rank)
    return value.detach().reshape(-1)[start:stop].view(like.shape)
