"""Gradients as the reductions left them, noted in a few elements.

Whether somebody wrote to ``.grad`` since, and by which factor, is asked before an
optimizer steps (``optim.clip_check``). Notes cost an operation per region and are taken
when a backward ends, in the few steps in which somebody wants them.
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
_PER_REGION = 256


class GradSample(NamedTuple):
    """What ``grad_shard`` was. Weakly, because a note must not keep its memory."""

    handle: weakref.ref[FlatParamHandle]
    gradient: weakref.ref[Tensor]
    version: int
    places: Tensor
    """Where elements were taken from."""
    leaves: tuple[int, ...]
    """The leaf that each belongs to."""
    values: Tensor


class _SampleRequest:
    """``backwards``: how many more are to be noted; asked at the end of each."""

    __slots__ = ("backwards",)

    def __init__(self) -> None:
        self.backwards = 0


SAMPLE_REQUEST = _SampleRequest()
GRAD_SAMPLES: weakref.WeakKeyDictionary[FlatParameter, GradSample] = (
    weakref.WeakKeyDictionary()
)
_places: weakref.WeakKeyDictionary[FlatParameter, tuple[Tensor, tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def sample_gradients(handles: Iterable[FlatParamHandle]) -> None:
    """Note the gradients of units that are cut over ranks. Sends nothing."""
    found = [
        (handle, region)
        for handle in handles
        if handle.groups.shard is not None
        for region in handle.trainable
        if region.grad_shard is not None
    ]
    for handle, region in found:
        _sample_region(handle, region)
    if found:
        # Where nobody can be asked, nothing was noted and nothing ever will be.
        SAMPLE_REQUEST.backwards = SAMPLE_REQUEST.backwards - 1 if GRAD_SAMPLES else 0


def sample_again() -> None:
    """Take what gradients are now for what the reductions left: we wrote to them."""
    for region, note in list(GRAD_SAMPLES.items()):
        handle, gradient = note.handle(), note.gradient()
        del GRAD_SAMPLES[region]
        if handle is not None and gradient is region.grad_shard is not None:
            _sample_region(handle, region)


@torch.no_grad()
def _sample_region(handle: FlatParamHandle, region: FlatParameter) -> None:
    gradient = region.grad_shard
    assert gradient is not None
    known = _places.get(region)
    if known is None or known[0].device != gradient.device:
        known = _places[region] = _choose(handle, region, gradient.device)
    places, leaves = known
    if leaves:
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
) -> tuple[Tensor, tuple[int, ...]]:
    """Some elements of each leaf, evenly over it; none if nobody can be asked."""
    group = handle.groups.shard
    if group is None or not can_compare(group):
        return torch.empty(0, device=device), ()
    most = max(1, min(_PER_LEAF, _PER_REGION // len(region.grad_views)))
    chosen = [
        (view.storage_offset() + view.numel() * i // count, index)
        for index, view in enumerate(region.grad_views)
        if view is not None
        for count in [min(most, view.numel())]
        for i in range(count)
    ]
    places = torch.tensor([place for place, _ in chosen], device=device)
    return places.long(), tuple(leaf for _, leaf in chosen)
