"""A region of a unit: flat buffers, the leaves that view them, and how it is reduced.

Views of ``shard``, ``full`` and ``reduce`` are created once, at build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout, ShardCuts


class Division(NamedTuple):
    """The divisors of sums over ranks."""

    before: float
    after: float
    by_backend: bool
    """Whether the collective itself averages; both divisors are then 1."""


NO_DIVISION = Division(1.0, 1.0, False)


@lru_cache(maxsize=64)  # a factor may change at each step
def divisor_of(divisor: float, dtype: torch.dtype) -> Tensor | float:
    """Return what divides plain tensors of ``dtype`` as the number does, but faster."""
    # Of a number torch makes a tensor at each division, which takes most of the time.
    # In other dtypes torch rounds the number less.
    if dtype not in (torch.float32, torch.float64):
        return divisor
    with torch.inference_mode(False):
        return torch.tensor(divisor, dtype=dtype, device="cpu")


def split_factor(factor: float) -> tuple[float, float]:
    """Split ``factor`` into a power of two and the rest, of similar size.

    >>> split_factor(8), split_factor(6), split_factor(1)
    ((4.0, 2.0), (4.0, 1.5), (1.0, 1.0))
    """
    first = 1.0
    while factor % first == 0 and first * first < factor:
        first *= 2
    return first, factor / first


@lru_cache(maxsize=64)  # all units of a model share few results
def division(
    factor: float | None, dtype: torch.dtype, ranks: int, can_average: bool
) -> Division:
    """Return the divisors of sums; ``factor`` of None: of an average over ``ranks``."""
    whole = float(ranks) if factor is None else factor
    # float16 ends at 65504: dividing only after the sum could overflow, and dividing by
    # the whole factor before the sum would flush small gradients to zero.
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        return Division(*split_factor(whole), by_backend=False)
    # A backend averages over the number of ranks and cannot use another factor.
    if factor is None and can_average:
        return Division(1.0, 1.0, by_backend=True)
    return Division(1.0, whole, by_backend=False)


@dataclass(slots=True, eq=False)
class ReduceRule:
    """The settings of a unit's collectives; written by ``access.settings``."""

    factor: float | None = None
    """Divisor of the sum over ranks; None: the number of ranks."""
    expert_ranks: int = 1
    """Ranks whose losses are in gradients of the unit's experts before any sum."""
    group: GroupRef | None = None
    """The group of reduce-scatters; None: the shard group."""
    all_reduce: bool = True
    """Whether a reduction all-reduces; else sums wait in ``ReduceBuffer.partial``."""
    fill: bool = False
    """Whether parameters without a gradient on this rank are reduced with zeros."""
    hook: Callable[..., object] | None = None
    """Communication hook of the user, which replaces the collectives and divides."""
    hook_state: Any = None
    keeps_empty: bool = False
    """Whether leaves without elements get an empty gradient, as in FSDP2."""
    force_sum: bool = False
    """Whether the collectives may only sum, also if the backend can average."""
    after_sum: Callable[[torch.Tensor], None] | None = None
    """Called with the sums of a region, before the division after the sum."""


# Readers of an attribute for loops in C, without a Python-level call for each tensor.
grad_of = attrgetter("grad")
post_hooks_of = attrgetter("_post_accumulate_grad_hooks")


class FullBuffer(NamedTuple):
    """The full values of a region in the compute dtype. Replaced as a whole."""

    buffer: Tensor
    """``(padded_numel,)``: the shards of all ranks, in rank order."""
    own_slice: Tensor | None
    """This rank's slice of ``buffer``, if the shard must be copied there; else None."""
    is_own: bool
    """Whether ``buffer`` is a buffer of its own. If not, ``buffer`` is ``shard``."""
    leaves: tuple[nn.Parameter, ...]
    """The full leaves, aligned with ``FlatParameter.leaves``."""


def no_owner() -> None:
    """Return the state of a region that has no hooks yet, or is in no unit: None."""


@dataclass(slots=True, eq=False)
class FlatGradient:
    """The reduced gradient of a region (``flat.gradients``)."""

    dtype: torch.dtype
    shown: bytes
    """Per parameter, 1 if its view was set as ``.grad``, so that a user may hold it."""
    unshown: bytes
    keeps_empty: bool = False
    shard: Tensor | None = None
    """The reduced gradient of this rank's elements; None if there is none."""
    views: list[Tensor | None] = field(default_factory=list)
    """``.grad`` of each leaf: a view of ``shard``; ``None`` for an absent one."""


@dataclass(slots=True, eq=False)
class ReduceBuffer:
    """The unreduced gradients of a trainable region, and their reduction."""

    buffer: Tensor
    """Unreduced gradients ``(padded_numel,)``."""
    views: tuple[Tensor, ...]
    gaps: tuple[Tensor, ...]
    arrived: bytearray
    """Per parameter: 1 if a gradient has arrived that was not reduced yet."""
    waiting: list[Tensor | None]
    """Per parameter: autograd's gradient, until the copy into ``buffer``."""
    # ``Any``: the class is in ``flat.handle``.
    progress: Any = None
    """That of a graph task whose gradients were all announced, and plain; else None."""
    owner: Callable[[], Any] = no_owner
    """Weak reference to the unit's state, for the hooks of the full leaves."""
    division: Division = NO_DIVISION
    """How sums over ranks become averages (``flat.build.set_divisions``)."""
    has_tensor_hooks: bool = False
    """Whether a tensor hook of the user must see a gradient of this reduction."""
    partial: Tensor | None = None
    """``(shard_numel,)``: sums that wait for the all-reduce; None if none wait."""
    temporary: Tensor | None = None
    """Output of a reduction that cannot write into the flat gradient."""


class Referable:
    """A base for dataclasses with slots, of which weak references are made."""

    __slots__ = ("__weakref__",)  # which dataclasses make from Python 3.11 on


@dataclass(slots=True, eq=False, repr=False)
class FlatParameter(Referable):
    """A region at run time. Created by ``flat.build``."""

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
    def is_exact(self) -> bool:
        """Whether ``full`` holds the values of the shards, neither cast nor encoded."""
        return self.layout.wire is None and self.full.buffer.dtype == self.layout.dtype

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
