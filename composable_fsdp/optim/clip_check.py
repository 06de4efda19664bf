"""Gradients that were scaled by another factor on each rank are refused.

``torch.nn.utils.clip_grad_norm_`` and whoever calls it (trainers do) take the norm of
this rank's shards for that of the model. Nothing tells them otherwise, so what they did
is looked for before the optimizer steps::

    end of backward     note some elements and the version of each flat gradient
    user                writes to gradients, or does not
    before the step     another version? by which factor? the same on the other ranks?

A write that is no scaling, or scales alike on all ranks, is the user's. Ranks that
wrote tell each other their factors in the key-value store, and wait for each other, so
all of them raise. Where nobody writes, a step asks for versions in the first steps and
in a few behind each power of two, and in the others nothing. While somebody writes, it
goes on, until factors were found right.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.grad_samples import GRAD_SAMPLES, SAMPLE_REQUEST, GradSample
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.optim.full_param_checks import handles_of, parameters_of

_BACKWARDS = 64
"""Backwards noted at most for one step: more would be an accumulation of gradients."""
_WINDOW = 2
"""Steps looked at from each power of two on."""
_TRUSTED = 3
"""Writes found right after which an optimizer is looked at in windows only."""
_PATIENCE = 5.0
"""Seconds to wait for ranks that hold elements and see no write; once an optimizer."""
_ENOUGH = 4
"""Elements of a leaf that a factor is told from at least."""
_TOLD = 64
"""Parameters whose factors are told at most, the largest first."""


class _Watched:
    """What is known of one optimizer that holds parts of parameters."""

    __slots__ = ("__weakref__", "alone", "ordinal", "said", "steps", "trust", "writes")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        """Of the optimizers met, on all ranks the same."""
        self.steps = self.trust = 0
        self.writes = self.alone = False
        """Whether gradients were written to, and that by this rank and not by all."""
        self.said: list[tuple[Peers, str]] = []
        """Places this rank was first at, the last two: to be removed by it."""


_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watched | None] = (
    weakref.WeakKeyDictionary()
)
_wishing: weakref.WeakSet[_Watched] = weakref.WeakSet()
_peers: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = (
    weakref.WeakKeyDictionary()
)
_met = 0


def expect_gradients() -> None:
    """Have gradients looked at before the next steps; called when a module is cut."""
    _watched.clear()
    _wishing.clear()
    SAMPLE_REQUEST.backwards = _BACKWARDS


def require_common_factor(optim: torch.optim.Optimizer) -> None:
    """Refuse gradients that each rank scaled by another factor.

    If this rank wrote to gradients, keys in the store and a bounded wait for the others
    that hold elements; sends no tensor.
    Raises: CompositionError, on all ranks that wrote.
    """
    watched = _watched.get(optim, _UNKNOWN)
    if watched is _UNKNOWN:
        watched = _watched[optim] = _register_optimizer(optim)
    if watched is None or watched.alone:
        return
    watched.steps += 1
    if GRAD_SAMPLES:
        _compare(optim, watched)
    steps = watched.steps
    if watched.writes or steps + 1 - (1 << (steps + 1).bit_length() - 1) < _WINDOW:
        _wishing.add(watched)
        SAMPLE_REQUEST.backwards = _BACKWARDS
    elif SAMPLE_REQUEST.backwards:
        _wishing.discard(watched)
        if not _wishing:
            SAMPLE_REQUEST.backwards = 0
            GRAD_SAMPLES.clear()


_UNKNOWN = _Watched(-1)


def _register_optimizer(optim: torch.optim.Optimizer) -> _Watched | None:
    global _met
    shards = (handle.groups.shard for handle in handles_of(optim))
    if not any(shard is not None and can_compare(shard) for shard in shards):
        return None
    _met += 1
    return _Watched(_met)


class _Write(NamedTuple):
    """A flat gradient that was written to."""

    handle: FlatParamHandle
    region: FlatParameter
    note: GradSample
    gradient: Tensor


def _compare(optim: torch.optim.Optimizer, watched: _Watched) -> None:
    held = set(map(id, parameters_of(optim)))
    writes: dict[dist.ProcessGroup, list[_Write]] = {}
    for region, note in list(GRAD_SAMPLES.items()):
        handle, gradient = note.handle(), note.gradient()
        if handle is None or gradient is None or gradient is not region.grad_shard:
            continue
        if gradient._version == note.version:
            continue
        mine = {id(region.flat)} | set(map(id, region.leaves))
        if mine.isdisjoint(held):
            continue
        # Asked last: the group of a model that nobody steps any more may be gone.
        group = handle.groups.shard
        if group is not None:
            write = _Write(handle, region, note, gradient)
            writes.setdefault(group, []).append(write)
    watched.writes = bool(writes)
    for group, found in writes.items():
        _exchange(optim, watched, group, found, held)


def _exchange(
    optim: torch.optim.Optimizer,
    watched: _Watched,
    group: dist.ProcessGroup,
    writes: Sequence[_Write],
    held: set[int],
) -> None:
    leaves = _leaves_of(writes, held)
    said = _statement(leaves)
    peers = _peers.get(group)
    if peers is None:
        peers = _peers[group] = Peers(group, "factors")
    place = f"{watched.ordinal}/{watched.steps}"
    if said.leaves or said.factor is not None:
        other = peers.say(place, json.dumps(said._asdict()))
        if other is None:
            watched.said.append((peers, place))
        else:
            wrong = _difference(
                said, _RankStatement(**json.loads(other.text)), other.rank
            )
            if wrong:
                peers.say(f"{place}/wrong", wrong)
    peers.arrive(f"{place}/all", _ranks_with_elements(writes))
    # Where more was done than scaling, others may have had nothing to do.
    mixed = any(leaf.is_changed_otherwise for leaf in leaves)
    if not mixed and not peers.all_arrived(f"{place}/all", _PATIENCE):
        watched.alone = True
    told = peers.heard(f"{place}/wrong")
    if told is not None:
        raise CompositionError(
            f"{type(optim).__name__} got gradients that were scaled after they were "
            f"averaged, {told}; expected one factor on all ranks. "
            "torch.nn.utils.clip_grad_norm_ does that, because it sees this rank's "
            "shards alone. Call composable_fsdp.clip_grad_norm_(model, max_norm) "
            "instead, or the wrapper's method; where a trainer clips, turn that off "
            "there. What is meant to differ by rank can be assigned: p.grad = ..."
        )
    if mixed or any(leaf.factor not in (None, 1.0) for leaf in leaves):
        watched.trust += 1
    if watched.trust >= _TRUSTED:
        watched.trust, watched.writes = 0, False
    for old_peers, old in watched.said[:-2]:
        for suffix in ("", "/wrong", "/all"):
            old_peers.remove(f"{old}{suffix}")
    del watched.said[:-2]


class _Leaf(NamedTuple):
    """What became of one leaf's noted elements."""

    name: str
    numel: int
    is_part: bool
    """Whether other ranks hold elements of it, too."""
    gradient: Tensor
    factor: float | None
    """``None`` if none can be told."""
    is_changed_otherwise: bool
    hints: list[float]
    """What its elements say where they are too few to tell a factor."""


def _leaves_of(writes: Sequence[_Write], held: set[int]) -> list[_Leaf]:
    """Every written leaf that this rank holds elements of and the optimizer steps."""
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
            slot, view = region.layout.parameters[index], region.grad_views[index]
            assert view is not None  # it has noted elements
            name = quoted(join_name(handle.full_fqn, slot.fqn))
            is_part = view.numel() < slot.numel
            found.append(
                _Leaf(name, slot.numel, is_part, view, *_factor(pairs, tolerance))
            )
    return found


@torch.no_grad()
def _on_host(
    writes: Sequence[_Write],
) -> tuple[list[list[float]], list[list[float]]]:
    """The noted elements, as they were and as they are; one wait for the GPU."""
    parts: list[Tensor] = []
    for _, _, note, gradient in writes:
        now = gradient.index_select(0, note.places)
        for each in (note.values, now):
            real = torch.view_as_real(each)[:, 0] if each.is_complex() else each
            parts.append(real.to(torch.float64))
    device = parts[-1].device
    numbers = torch.cat([part.to(device) for part in parts]).tolist()
    rows, at = [], 0
    for part in parts:
        rows.append(numbers[at : at + part.numel()])
        at += part.numel()
    return rows[::2], rows[1::2]


def _factor(
    pairs: Sequence[tuple[float, float]], tolerance: float
) -> tuple[float | None, bool, list[float]]:
    """By what elements were multiplied; whether something else was done; hints."""
    if all(now == then for then, now in pairs):
        return (1.0 if any(then for then, _ in pairs) else None), False, []
    largest = max(abs(then) for then, _ in pairs)
    if not 0 < largest < float("inf"):
        return None, largest == 0, []
    # Small ones lose digits in half precision, and zeros say nothing.
    ratios = [now / then for then, now in pairs if abs(then) > 1e-2 * largest]
    mean = sum(ratios) / len(ratios)
    if mean != mean or mean == 0:
        return None, False, []
    # What each differs by from the factor: by itself, and small ones as the largest.
    spread = max(ratios) - min(ratios)
    off = max(abs(now - mean * then) for then, now in pairs) / largest
    # A clip makes nothing larger.
    if not (max(spread, off) <= 2 * tolerance * mean and mean <= 1 + tolerance):
        return None, True, []
    return (mean, False, []) if len(ratios) >= _ENOUGH else (None, False, ratios)


def _tolerance(dtype: torch.dtype) -> float:
    """How far a factor may be from what two elements say, for two roundings each."""
    return max(1e-5, 2.1 * torch.finfo(dtype).eps)


class _RankStatement(NamedTuple):
    """What a rank tells of its gradients.

    ``leaves``: factors of parameters that others hold parts of, too. ``factor`` and
    ``norm``: of all that were changed, if that is one.
    """

    leaves: dict[str, float]
    factor: float | None
    norm: float
    tolerance: float


def _statement(leaves: Sequence[_Leaf]) -> _RankStatement:
    parts = [leaf for leaf in leaves if leaf.is_part and leaf.factor is not None]
    parts.sort(key=lambda leaf: -leaf.numel)
    told = {leaf.name: leaf.factor for leaf in parts[:_TOLD] if leaf.factor is not None}
    # Of means of several elements, roundings are half as far apart.
    tolerance = max((_tolerance(leaf.gradient.dtype) / 2 for leaf in leaves), default=0)
    factors = [leaf.factor for leaf in leaves if leaf.factor not in (None, 1.0)]
    clear = [factor for factor in factors if factor is not None]
    hints = [hint for leaf in leaves for hint in leaf.hints]
    if not clear and len(hints) > 1:
        clear = hints  # of small parameters, all scaled alike
    if any(leaf.is_changed_otherwise for leaf in leaves) or not clear:
        return _RankStatement(told, None, 0.0, tolerance)
    if _differ(max(clear), min(clear), tolerance):
        return _RankStatement(told, None, 0.0, tolerance)
    written = [leaf.gradient for leaf in leaves if leaf.factor != 1.0]
    norm = torch.stack([g.double().norm().cpu() for g in written]).norm().item()
    return _RankStatement(told, clear[0], norm, tolerance)


def _differ(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) > tolerance * max(one, other)


def _difference(mine: _RankStatement, theirs: _RankStatement, rank: int) -> str:
    """What two ranks did differently, in words; empty if nothing is known of it."""
    own, tolerance = dist.get_rank(), max(mine.tolerance, theirs.tolerance)
    for name, factor in mine.leaves.items():
        other = theirs.leaves.get(name, factor)
        if _differ(factor, other, tolerance):
            return _difference_text(f"that of {name}", factor, own, other, rank)
    # They hold no parameter together. To the same norm of its own, each: a clip.
    if mine.factor is None or theirs.factor is None:
        return ""
    same = not _differ(mine.factor, theirs.factor, tolerance)
    if same or _differ(mine.norm, theirs.norm, max(tolerance, 1e-3)):
        return ""
    return _difference_text("all", mine.factor, own, theirs.factor, rank)


def _difference_text(what: str, one: float, own: int, other: float, rank: int) -> str:
    pairs = sorted([(own, one), (rank, other)])
    return f"{what} by " + " and by ".join(
        f"{factor:.4g} on rank {each}" for each, factor in pairs
    )


def _ranks_with_elements(writes: Sequence[_Write]) -> int:
    """How many ranks of the group hold any of what was written to: the first ones."""
    layouts = [write.region.layout for write in writes]
    ends = [
        (max(slot.offset + slot.numel for slot in layout.parameters), layout)
        for layout in layouts
    ]
    return max(-(-end // layout.shard_numel) for end, layout in ends)
