"""Samples of the gradients as the reductions left them: a few elements per region.

Before an optimizer step, ``optim.clip_check`` compares the samples with the gradients
to find out whether a user wrote to ``.grad``, and by which factor. A sample costs an
operation per region, so samples are taken at the end of a backward, and only in the few
steps for which ``SAMPLE_REQUEST`` asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from composable_fsdp.comm.agreement import can_compare
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter

_PER_LEAF = 8
"""Largest number of elements sampled per leaf."""
_PER_REGION = 256
"""Approximate number of elements sampled per region."""


# Weak references, because a sample must not keep the memory of a gradient alive.
class GradSample(NamedTuple):
    """A sample of the ``gradient.shard`` of a region."""

    handle: weakref.ref[FlatParamHandle]
    gradient: weakref.ref[Tensor]
    version: int
    """Version counter of the gradient when the sample was taken."""
    places: Tensor
    """Indices of the sampled elements in ``gradient.shard``, int64."""
    leaves: tuple[int, ...]
    """Index of the leaf to which each sampled element belongs."""
    values: Tensor
    """The sampled elements."""


class _SampleRequest:
    """``backwards``: number of backwards that still take samples at their end."""

    __slots__ = ("backwards",)

    def __init__(self) -> None:
        self.backwards = 0

    def set(self, backwards: int) -> None:
        """Request samples of the next ``backwards`` backwards."""
        self.backwards = backwards


SAMPLE_REQUEST = _SampleRequest()
GRAD_SAMPLES: weakref.WeakKeyDictionary[FlatParameter, GradSample] = (
    weakref.WeakKeyDictionary()
)
"""The latest sample of each region."""
_places: weakref.WeakKeyDictionary[
    FlatParameter, tuple[Tensor | None, tuple[int, ...]]
] = weakref.WeakKeyDictionary()
"""Positions chosen for each region, computed once; None if there is no sample of it."""


def sample_gradients(handles: Iterable[FlatParamHandle]) -> None:
    """Sample the gradients of all units with a shard group. Collective: none."""
    # Only sharded units: the ranks of a replicated unit hold equal gradients.
    found = [
        (handle, region)
        for handle in handles
        if handle.groups.shard is not None
        for region in handle.layout.trainable
        if region.gradient.shard is not None
    ]
    for handle, region in found:
        _sample_region(handle, region)
    if found:
        # No sample means that no group has peers to compare with: stop asking.
        SAMPLE_REQUEST.set(SAMPLE_REQUEST.backwards - 1 if GRAD_SAMPLES else 0)


def sample_again() -> None:
    """Replace all samples after this package itself wrote to gradients."""
    for region, note in list(GRAD_SAMPLES.items()):
        handle, gradient = note.handle(), note.gradient()
        del GRAD_SAMPLES[region]
        # A sample of a gradient that was replaced since is dropped and not taken again.
        if handle is not None and gradient is region.gradient.shard is not None:
            _sample_region(handle, region)


@torch.no_grad()
def _sample_region(handle: FlatParamHandle, region: FlatParameter) -> None:
    """Sample the gradient of ``region``, if the region has positions to sample."""
    gradient = region.gradient.shard
    assert gradient is not None
    known = _places.get(region)
    if known is None or (known[0] is not None and known[0].device != gradient.device):
        # The positions are a tensor on the gradient's device, chosen once per region.
        known = _places[region] = _choose(handle, region, gradient.device)
    places, leaves = known
    if places is None:
        return
    # A region without elements here is noted, too: the ranks of a group must agree on
    # which regions were sampled.
    GRAD_SAMPLES[region] = GradSample(
        weakref.ref(handle),
        weakref.ref(gradient),
        gradient._version,
        places,
        leaves,
        gradient.index_select(0, places),
    )


def _choose(
    handle: FlatParamHandle, region: FlatParameter, device: torch.device
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Choose positions, evenly spread over each leaf; None if ranks cannot compare."""
    group = handle.groups.shard
    if group is None or not can_compare(group):
        return None, ()
    # At least 1, so that every leaf with elements is sampled.
    most = max(1, min(_PER_LEAF, _PER_REGION // len(region.gradient.views)))
    chosen = [
        (view.storage_offset() + view.numel() * i // count, index)
        for index, view in enumerate(region.gradient.views)
        if view is not None
        for count in [min(most, view.numel())]
        for i in range(count)
    ]
    places = torch.tensor([place for place, _ in chosen], device=device)
    return places.long(), tuple(leaf for _, leaf in chosen)
