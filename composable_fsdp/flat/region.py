"""A region of a unit: flat buffers, and the leaves that view the buffers.

::

    buffer         shape            has memory           viewed by
    shard          (shard_numel,)   always               sharded leaves (originals)
    full           (padded_numel,)  while unsharded      full leaves (for compute)
    reduce_buffer  (padded_numel,)  during backward      gradients before reduction
    grad_shard     (shard_numel,)   until grads cleared  ``.grad`` of sharded leaves

The views of ``shard``, ``full`` and ``reduce_buffer`` are created once, at build. The
views of ``grad_shard`` are created together with ``grad_shard`` (``flat.gradients``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat.reduce_rule import Division
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout, ShardCuts


class FlatParameter:
    """A region at run time. Created by ``build_region``."""

    __slots__ = (
        "__weakref__",
        "absent",
        "arrived",
        "cuts",
        "division",
        "device",
        "flat",
        "full",
        "full_leaves",
        "gaps",
        "grad_dtype",
        "grad_gaps",
        "grad_places",
        "grad_shard",
        "grad_views",
        "has_tensor_hooks",
        "in_flight",
        "is_cut",
        "layout",
        "leaves",
        "offload",
        "own_slice",
        "owned",
        "owner",
        "partial",
        "rank",
        "reduce_buffer",
        "reduce_views",
        "shard",
        "shown",
        "temporary",
        "unshown",
        "waiting",
    )

    layout: RegionLayout
    rank: int
    """This rank's index in the shard group."""
    cuts: ShardCuts
    """How ``shard`` and ``grad_shard`` are cut into parts of parameters and padding."""
    is_cut: bool
    """Whether ``full`` is a buffer of its own. If not, ``full`` is ``shard``."""
    device: torch.device
    """The device of ``full`` and ``reduce_buffer``."""
    offload: bool
    """Whether ``shard`` and ``grad_shard`` are in host memory (pinned if the compute
    device is a GPU)."""
    shard: Tensor
    full: Tensor
    own_slice: Tensor | None
    """This rank's slice ``(shard_numel,)`` of ``full``, if the shard must be cast or
    copied from the host into ``full`` before the all-gather. ``None`` if the all-gather
    reads ``shard`` directly."""
    owner: Callable[[], Any]
    """Weak reference to the unit's state, for the gradient hooks of ``full_leaves``."""
    leaves: tuple[nn.Parameter, ...]
    """The sharded leaves: the original parameters, in memory order."""
    absent: tuple[int, ...]
    """Indices of leaves that have no element on this rank but elements on other
    ranks."""
    full_leaves: tuple[nn.Parameter, ...]
    """The full leaves, aligned with ``leaves``."""
    reduce_buffer: Tensor | None
    """Unreduced gradients; ``None`` for a frozen region."""
    reduce_views: tuple[Tensor, ...]
    """The view of each parameter's gradient in ``reduce_buffer``."""
    gaps: tuple[Tensor, ...]
    """Views of the padding in ``reduce_buffer``."""
    grad_dtype: torch.dtype
    """Dtype of ``grad_shard``: the parameters' dtype, or the reduce dtype if
    ``keep_low_precision_grads`` is set."""
    grad_shard: Tensor | None
    """The reduced gradient of this rank's elements. ``None`` before the first
    reduction, and after ``.grad`` of all leaves was cleared (released at the next
    forward or reduction)."""
    grad_views: tuple[Tensor | None, ...]
    """``.grad`` of each leaf: a view of ``grad_shard``, or ``None`` for a leaf in
    ``absent``."""
    grad_gaps: tuple[Tensor, ...]
    """Views of the padding in ``grad_shard``."""
    grad_places: tuple[int, ...]
    """Addresses of ``grad_shard`` and of its views at creation. A changed address shows
    that a user replaced ``.data``."""
    shown: bytes
    """Per parameter: 1 if the parameter's view of ``grad_shard`` was set as ``.grad``,
    so that a user may hold a reference to the view."""
    unshown: bytes
    """The initial value of ``shown``: zeros."""
    flat: nn.Parameter | None
    """``shard`` as a single parameter, or ``None`` (``flat_parameter``). If set,
    ``grad_shard`` is the ``.grad`` of ``flat`` and the leaves have no ``.grad``."""
    arrived: bytearray
    """Per parameter: 1 if a gradient has arrived that was not reduced yet."""
    waiting: list[Tensor | None]
    """Per parameter: the gradient as autograd produced the gradient, until the copy
    into ``reduce_buffer``."""
    has_tensor_hooks: bool
    """Whether, in the current reduction, a leaf has tensor hooks of the user that must
    see the gradient."""
    division: Division
    """How sums over ranks become averages."""
    partial: Tensor | None
    """``(shard_numel,)`` in the reduce dtype: sums over the shard group that wait for
    the all-reduce over the replicate group (``set_requires_all_reduce``); ``None`` if
    no sums wait."""
    temporary: Tensor | None
    """Output of the reduction if the reduction cannot write into ``grad_shard``, which
    holds earlier gradients, has another dtype or is on the host."""
    in_flight: bytearray | None
    """Offloaded units only, while a device-to-host copy into ``grad_shard`` is in
    flight: per parameter, 1 if the parameter gets a gradient. The host must not read or
    write ``grad_shard`` until the copy has ended. ``None`` if no copy is in flight."""
    owned: dict[int, Tensor]
    """During the copy of ``in_flight``: by index of the parameter, gradients that are
    tensors of the user and no views of ``grad_shard``."""

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"FlatParameter({len(self.leaves)} parameters, {layout.dtype}, numel "
            f"{layout.numel}, padded_numel {layout.padded_numel}, shard_numel "
            f"{layout.shard_numel}, rank {self.rank})"
        )


def part_of(
    region: FlatParameter, slot: ParameterSlot, value: Tensor, *, like: Tensor
) -> Tensor:
    """Return this rank's part of the full ``value``, in the shape of ``like``.

    Args:
        region: the region of the parameter.
        slot: the parameter's place in the layout.
        value: the full value.
        like: the sharded parameter.

    Returns: a view of ``value`` if ``value`` is contiguous.
    Collective: none.
    """
    start, stop = region.layout.interval(slot, region.rank)
    return value.detach().reshape(-1)[start:stop].view(like.shape)
