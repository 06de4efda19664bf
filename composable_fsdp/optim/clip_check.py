"""Refuse gradients that each rank has scaled by another factor.

``torch.nn.utils.clip_grad_norm_``, which trainers call, takes the norm of this rank's
shards for the norm of the model. The optimizer's pre-step hook detects this::

    end of backward     note some elements and the version of each flat gradient
    user                writes to gradients, or does not
    before the step     another version? by which factor? the same on the other ranks?

A write is accepted if it does not scale, or if it scales by the same factor on all
ranks. In each step that is checked, all ranks of a shard group meet in the key-value
store, ranks without a gradient too, so that a refusal is raised on all of them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.grad_samples import (
    GRAD_SAMPLES,
    SAMPLE_REQUEST,
    GradSample,
    samples_of,
    sharing_group,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import quoted
from composable_fsdp.optim.full_param_checks import handles_of, parameters_of

_BACKWARDS = 64
"""Maximum number of backwards sampled for a step. More backwards than this are gradient
accumulation."""
_WINDOW = 2
"""Number of steps checked from each power of two on."""
_TRUSTED = 3
"""Number of accepted writes after which an optimizer is checked in windows only."""
_PATIENCE = 5.0
"""Seconds to wait for ranks of a shard group that do not step; spent at most once per
optimizer and group."""
_ENOUGH = 4
"""Minimum number of elements of a leaf from which a factor is computed."""
_TOLD = 64
"""Maximum number of parameters whose factors are sent, the largest parameters first."""


class _GroupCheck:
    """State of the check for an optimizer and a shard group; equal on its ranks."""

    __slots__ = ("alone", "first", "peers", "trust", "writes")

    def __init__(self, handle: FlatParamHandle, group: dist.ProcessGroup) -> None:
        # The peers of the order log and no others: ranks came to the first reduction of
        # a model together, so its keys are the same on all ranks, whatever optimizers
        # of other models each rank has stepped. The order log of a single data rank has
        # no peers; ranks of tensor parallelism step alike.
        log = handle.logs.reduce
        if handle.groups.shard is None:
            self.peers = Peers(group, "factors")
        else:
            assert log is not None  # its gradients were reduced
            self.peers = log.comparison.peers[0]
        self.first = handle.name
        """The first unit of the optimizer in this group."""
        # ``writes``: a rank wrote to gradients before the last step. ``alone``: other
        # ranks did not come, so that the check is off.
        self.writes = self.alone = False
        self.trust = 0

    def next_place(self) -> str:
        """Return a new place; the same on all ranks that step the same optimizers."""
        counts = _exchanges.setdefault(self.peers, Counter())
        counts[self.first] += 1
        return f"factors/{self.first}/{counts[self.first]}"


class _Watched:
    """State of the check for an optimizer that holds sharded parameters."""

    __slots__ = ("__weakref__", "groups", "steps", "writes")

    def __init__(self) -> None:
        self.steps = 0
        self.writes = False
        """Whether one of ``groups`` is checked in every step."""
        self.groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupCheck] = (
            weakref.WeakKeyDictionary()
        )


_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watched | None] = (
    weakref.WeakKeyDictionary()
)
_wishing: weakref.WeakSet[_Watched] = weakref.WeakSet()
"""Optimizers that need samples of the next backward."""
_exchanges: weakref.WeakKeyDictionary[Peers, Counter[str]] = weakref.WeakKeyDictionary()
"""Number of exchanges of the ranks of an order log, by ``_GroupCheck.first``."""


def expect_gradients() -> None:
    """Have gradients sampled before the next steps; called when a module is sharded."""
    if _watched:
        _watched.clear()
        _wishing.clear()
    SAMPLE_REQUEST.set(_BACKWARDS)


def require_common_factor(optim: torch.optim.Optimizer) -> None:
    """Refuse gradients that each rank scaled by another factor.

    Collective: none. In the steps that are checked, the ranks of each shard group
    exchange keys in the store and wait for each other, at most ``_PATIENCE`` seconds.
    Raises: CompositionError, on all ranks of the shard group.
    """
    watched = _watched.get(optim, _UNKNOWN)
    if watched is _UNKNOWN:
        watched = _watched[optim] = _register_optimizer(optim)
    if watched is None:
        return
    watched.steps += 1
    if GRAD_SAMPLES:
        _compare(optim, watched)
    # Without writes, request samples only in the first ``_WINDOW`` steps from each
    # power of two on; all other steps cost nothing. After a write, request samples for
    # every step until ``_TRUSTED`` writes were accepted.
    if watched.writes or _is_in_window(watched.steps + 1):
        _wishing.add(watched)
        SAMPLE_REQUEST.set(_BACKWARDS)
    elif SAMPLE_REQUEST.backwards:
        # Turn sampling off for all optimizers only if no other optimizer still needs
        # samples.
        _wishing.discard(watched)
        if not _wishing:
            SAMPLE_REQUEST.set(0)
            GRAD_SAMPLES.clear()


_UNKNOWN = _Watched()
"""Marks an optimizer that was never seen; None marks one that needs no check."""


def _is_in_window(step: int) -> bool:
    """Return whether ``step``, counted from 1, is checked also without writes."""
    return step - (1 << step.bit_length() - 1) < _WINDOW


def _register_optimizer(optim: torch.optim.Optimizer) -> _Watched | None:
    """Return a new record; None without a shard group whose ranks can be compared."""
    shards = map(sharing_group, handles_of(optim))
    if not any(shard is not None and can_compare(shard) for shard in shards):
        return None
    return _Watched()


class _Write(NamedTuple):
    """A flat gradient that was written to after the reduction."""

    handle: FlatParamHandle
    region: FlatParameter
    note: GradSample
    gradient: Tensor


def _compare(optim: torch.optim.Optimizer, watched: _Watched) -> None:
    """Find the written gradients of ``optim`` and compare them per shard group."""
    held = set(map(id, parameters_of(optim)))
    # Shard groups with a sampled gradient are equal on all their ranks, also if this
    # rank holds no element or saw no write.
    writes: dict[dist.ProcessGroup, list[_Write]] = {}
    first: dict[dist.ProcessGroup, FlatParamHandle] = {}
    for region, note in samples_of(held):
        handle, gradient = note.handle(), note.gradient()
        if handle is None:
            continue
        # Read the group last: the group of a model that is no longer trained may be
        # destroyed.
        group = sharing_group(handle)
        if group is None:
            continue
        found = writes.setdefault(group, [])
        first.setdefault(group, handle)
        # In-place writes raise the version counter of the flat gradient. Assigning
        # ``p.grad`` does not, so an assigned gradient is accepted.
        if gradient is None or gradient is not region.gradient.shard or not note.leaves:
            continue
        if gradient._version != note.version:
            found.append(_Write(handle, region, note, gradient))
    told = None
    for group, found in writes.items():
        check = watched.groups.get(group)
        if check is None:
            check = watched.groups[group] = _GroupCheck(first[group], group)
        if check.alone or not (check.writes or _is_in_window(watched.steps)):
            continue
        leaves = _leaves_of(found, held) if found else []
        # Raise after the last group, whose other ranks wait for this one.
        told = _exchange(check, leaves, has_written=bool(found)) or told
    watched.writes = any(check.writes for check in watched.groups.values())
    if told is not None:
        raise _refusal(optim, told)


def _exchange(
    check: _GroupCheck, leaves: Sequence[_Leaf], *, has_written: bool
) -> str | None:
    """Exchange factors with the other ranks of the group through the key-value store.

    Returns: how factors differ, the same text on all ranks; or None.
    """
    peers, place = check.peers, check.next_place()
    mixed = any(leaf.is_changed_otherwise for leaf in leaves)
    changed = mixed or any(leaf.factor not in (None, 1.0) for leaf in leaves)
    said = _statement(leaves)
    if said.leaves or said.factor is not None:
        # The first rank that writes the key sets the reference; every later rank
        # compares itself with the first, and writes the difference under a second key.
        other = peers.say(place, said)
        if other is not None:
            wrong = _difference(said, _RankStatement(*other.value), other.rank)
            if wrong:
                peers.say(f"{place}/wrong", wrong)
    # All ranks read the same counts, and the texts only after the last rank came.
    counts = peers.tally(place, (has_written, changed), _PATIENCE)
    check.alone = counts is None
    check.writes = False
    if counts is None or not counts[0]:
        return None
    told: str | None = peers.heard(f"{place}/wrong")
    peers.drop_later(place, f"{place}/wrong")
    check.trust += counts[1] > 0
    if check.trust >= _TRUSTED:
        check.trust = 0
    else:
        check.writes = True
    return told


def _refusal(optim: torch.optim.Optimizer, told: str) -> CompositionError:
    """Return the error of a step whose gradients were scaled as ``told`` says."""
    return CompositionError(
        f"{type(optim).__name__} got gradients that were scaled after they were "
        f"averaged, {told}; expected one factor on all ranks. "
        "torch.nn.utils.clip_grad_norm_ does that, because it sees this rank's "
        "shards alone. Call composable_fsdp.clip_grad_norm_(model, max_norm) "
        "instead, or the wrapper's method; where a trainer clips, turn that off "
        "there. What is meant to differ by rank can be assigned: p.grad = ..."
    )


class _Leaf(NamedTuple):
    """The comparison of the sampled elements of a leaf before and after the write."""

    name: str
    numel: int
    is_part: bool
    """Whether other ranks hold elements of the parameter, too."""
    gradient: Tensor
    factor: float | None
    """The common factor, or None if the elements do not show a factor."""
    is_changed_otherwise: bool
    """Whether the write did something else than scale."""
    hints: list[float]
    """Ratios of single elements, if there are fewer than ``_ENOUGH`` of them."""


def _leaves_of(writes: Sequence[_Write], held: set[int]) -> list[_Leaf]:
    """Return every written leaf that has elements here and that the optimizer steps."""
    before, after = _on_host(writes)
    found = []
    for write, then, now in zip(writes, before, after, strict=True):
        region, handle = write.region, write.handle
        values: dict[int, list[tuple[float, float]]] = {}
        for leaf, *pair in zip(write.note.leaves, then, now, strict=True):
            values.setdefault(leaf, []).append((pair[0], pair[1]))
        is_flat = region.flat is not None and id(region.flat) in held
        tolerance = _tolerance(write.gradient.dtype)
        for index, pairs in values.items():
            if not is_flat and id(region.leaves[index]) not in held:
                continue
            slot, view = region.layout.parameters[index], region.gradient.views[index]
            assert view is not None  # a leaf with samples has elements here
            name = quoted(slot_path(handle, slot))
            is_part = view.numel() < slot.numel or slot.whole is not None
            found.append(
                _Leaf(name, slot.numel, is_part, view, *_factor(pairs, tolerance))
            )
    return found


@torch.no_grad()
def _on_host(
    writes: Sequence[_Write],
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the sampled elements before and after the write, as host numbers."""
    parts: list[Tensor] = []
    for _, _, note, gradient in writes:
        now = gradient.index_select(0, note.places)
        for each in (note.values, now):
            # The real parts are enough to find a real factor.
            real = torch.view_as_real(each)[:, 0] if each.is_complex() else each
            parts.append(real.to(torch.float64))
    device = parts[-1].device
    # A single copy to the host, so that the host waits for the GPU once.
    numbers = torch.cat([part.to(device) for part in parts]).tolist()
    rows, at = [], 0
    for part in parts:
        rows.append(numbers[at : at + part.numel()])
        at += part.numel()
    return rows[::2], rows[1::2]


def _factor(
    pairs: Sequence[tuple[float, float]], tolerance: float
) -> tuple[float | None, bool, list[float]]:
    """Return the factor, whether something else than scaling was done, and hints.

    ``pairs`` are the sampled elements ``(before, after)`` of a leaf.
    """
    if all(now == then for then, now in pairs):
        # Elements that are all zero are unchanged under every factor.
        return (1.0 if any(then for then, _ in pairs) else None), False, []
    largest = max(abs(then) for then, _ in pairs)
    if not 0 < largest < float("inf"):
        return None, largest == 0, []
    # Leave out small elements, which lose digits in half precision, and zeros, which
    # have no ratio.
    ratios = [now / then for then, now in pairs if abs(then) > 1e-2 * largest]
    mean = sum(ratios) / len(ratios)
    if mean != mean or mean == 0:
        return None, False, []
    # Require that the ratios agree with each other, and that every element, also a
    # small one, agrees with ``mean`` relative to the largest element.
    spread = max(ratios) - min(ratios)
    off = max(abs(now - mean * then) for then, now in pairs) / largest
    # A factor above 1 is no clipping of gradients and counts as another kind of write.
    if not (max(spread, off) <= 2 * tolerance * mean and mean <= 1 + tolerance):
        return None, True, []
    return (mean, False, []) if len(ratios) >= _ENOUGH else (None, False, ratios)


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative error of a factor computed from two elements of ``dtype``."""
    # Each of the two elements was rounded twice.
    return max(1e-5, 2.1 * torch.finfo(dtype).eps)


class _RankStatement(NamedTuple):
    """The message of a rank about its gradients.

    ``leaves``: factors of parameters of which other ranks hold parts, too. ``factor``
    and ``norm``: the common factor of all changed gradients and their norm after the
    write; ``factor`` is None if there is no common factor.
    """

    leaves: dict[str, float]
    factor: float | None
    norm: float
    tolerance: float
    """Relative rounding error of the factors."""


def _statement(leaves: Sequence[_Leaf]) -> _RankStatement:
    """Build this rank's message."""
    parts = [leaf for leaf in leaves if leaf.is_part and leaf.factor is not None]
    parts.sort(key=lambda leaf: -leaf.numel)
    told = {leaf.name: leaf.factor for leaf in parts[:_TOLD] if leaf.factor is not None}
    # A mean of several elements has about half the rounding error.
    tolerance = max((_tolerance(leaf.gradient.dtype) / 2 for leaf in leaves), default=0)
    factors = [leaf.factor for leaf in leaves if leaf.factor not in (None, 1.0)]
    clear = [factor for factor in factors if factor is not None]
    hints = [hint for leaf in leaves for hint in leaf.hints]
    if not clear and len(hints) > 1:
        # If all leaves are small, their elements together show a factor if all were
        # scaled alike.
        clear = hints
    if any(leaf.is_changed_otherwise for leaf in leaves) or not clear:
        return _RankStatement(told, None, 0.0, tolerance)
    if _differ(max(clear), min(clear), tolerance):
        return _RankStatement(told, None, 0.0, tolerance)
    written = [leaf.gradient for leaf in leaves if leaf.factor != 1.0]
    norm = torch.stack([g.double().norm().cpu() for g in written]).norm().item()
    return _RankStatement(told, clear[0], norm, tolerance)


def _differ(one: float, other: float, tolerance: float) -> bool:
    """Return whether two factors differ by more than the relative ``tolerance``."""
    return abs(one - other) > tolerance * max(one, other)


def _difference(mine: _RankStatement, theirs: _RankStatement, rank: int) -> str:
    """Return a text on how two ranks scaled differently, or an empty string."""
    own, tolerance = dist.get_rank(), max(mine.tolerance, theirs.tolerance)
    for name, factor in mine.leaves.items():
        other = theirs.leaves.get(name, factor)
        if _differ(factor, other, tolerance):
            return _difference_text(f"that of {name}", factor, own, other, rank)
    # The ranks share no parameter. Different factors alone may be intended; if also the
    # norms after the write are equal, each rank has clipped by its own norm.
    if mine.factor is None or theirs.factor is None:
        return ""
    same = not _differ(mine.factor, theirs.factor, tolerance)
    if same or _differ(mine.norm, theirs.norm, max(tolerance, 1e-3)):
        return ""
    return _difference_text("all", mine.factor, own, theirs.factor, rank)


def _difference_text(what: str, one: float, own: int, other: float, rank: int) -> str:
    """Return the text for two factors, in the order of the ranks."""
    pairs = sorted([(own, one), (rank, other)])
    return f"{what} by " + " and by ".join(
        f"{factor:.4g} on rank {each}" for each, factor in pairs
    )
