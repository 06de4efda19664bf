"""Samples of the gradients as the reductions left them: a few elements per region.

Before an optimizer step, ``optim.clip_check`` compares the samples with the gradients
to find out whether a user wrote to ``.grad``, and by which factor. A sample costs an
operation per region, so samples are taken at the end of a backward, and only in the few
steps for which ``SAMPLE_REQUEST`` asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
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


def sharing_group(handle: FlatParamHandle) -> dist.ProcessGroup | None:
    """Return a group whose ranks hold other parts of the unit's gradients, or None."""
    group = handle.groups.shard
    if group is not None or not handle.layout.forms:
        return group
    # A single data rank: the ranks of tensor parallelism must still scale alike.
    forms = [handle.layout.forms[index] for index in sorted(handle.layout.forms)]
    return next((each for form in forms for each in form.cut_over), None)


def sample_gradients(handles: Iterable[FlatParamHandle]) -> None:
    """Sample the gradients of all units with a shard group. Collective: none."""
    groups: dict[dist.ProcessGroup, bool] = {}
    sampled = False
    for handle in handles:
        # Only sharded units: the ranks of a replicated unit hold equal gradients.
        group = sharing_group(handle)
        if group is None:
            continue
        if group not in groups:
            groups[group] = can_compare(group)
        for region in handle.layout.trainable:
            gradient = region.gradient.shard
            if gradient is not None:
                sampled = True
                if groups[group]:
                    _sample(handle, region, gradient)
    if sampled:
        # No sample means that no group has peers to compare with: stop asking.
        SAMPLE_REQUEST.set(SAMPLE_REQUEST.backwards - 1 if GRAD_SAMPLES else 0)


def samples_of(held: Container[int]) -> list[tuple[FlatParameter, GradSample]]:
    """Return the samples of regions with a parameter or flat parameter in ``held``.

    ``held``: identities. Collective: none.
    """
    return [
        (region, note)
        for region, note in list(GRAD_SAMPLES.items())
        if id(region.flat) in held or any(id(each) in held for each in region.leaves)
    ]


def unwritten_samples(held: Container[int]) -> list[tuple[FlatParameter, GradSample]]:
    """Return the samples of ``samples_of`` whose gradients nobody wrote to since.

    Ask before this package itself writes to gradients, and pass the result to
    ``sample_again`` after that. Collective: none.
    """
    # A gradient that the user has written to keeps its sample: the package scales by
    # the same factor on all ranks, so factors that differ stay different.
    return [
        (region, note)
        for region, note in samples_of(held)
        if (gradient := note.gradient()) is not None
        and gradient is region.gradient.shard
        and gradient._version == note.version
    ]


def sample_again(unwritten: Iterable[tuple[FlatParameter, GradSample]]) -> None:
    """Replace these samples after this package itself wrote to their gradients."""
    for region, note in unwritten:
        handle, gradient = note.handle(), note.gradient()
        if handle is not None and gradient is not None:
            _sample(handle, region, gradient)


def _sample(handle: FlatParamHandle, region: FlatParameter, gradient: Tensor) -> None:
    """Sample ``gradient``, the flat gradient of ``region``."""
    # A region without elements here is noted, too: the ranks of a group must agree on
    # which regions were sampled.
    indices, leaves = _choose(region.cuts.parts)
    key = indices, gradient.device
    places = _places.get(key)
    if places is None or type(gradient) is not Tensor:
        places = gradient.new_tensor(indices, dtype=torch.int64)
        # A fake tensor belongs to its mode, and the cache outlives the mode.
        if type(places) is Tensor:
            _places[key] = places
    GRAD_SAMPLES[region] = GradSample(
        weakref.ref(handle),
        weakref.ref(gradient),
        gradient._version,
        places,
        leaves,
        # Detached, because gradients are enabled inside a backward with
        # ``create_graph``.
        gradient.detach().index_select(0, places),
    )


_places: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
"""Positions as a tensor, by positions and device; a few KB per layout."""


# Units of equal layout have equal positions.
@lru_cache(maxsize=256)
def _choose(
    parts: tuple[tuple[int, int, int], ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose positions in a flat gradient, evenly spread over each leaf.

    ``parts`` are the ``ShardCuts.parts`` of the region. Returns the positions, and the
    index of the leaf at each position.
    """
    # At least 1, so that every leaf with elements is sampled.
    most = max(1, min(_PER_LEAF, _PER_REGION // len(parts)))
    chosen = [
        (offset + (stop - start) * i // count, index)
        for index, (start, stop, offset) in enumerate(parts)
        for count in [min(most, stop - start)]
        for i in range(count)
    ]
    return tuple([place for place, _ in chosen]), tuple([leaf for _, leaf in chosen])
