"""The passages of everything: casts, containers, attributes, writes to weights.

Passages are not combined: values enter in an order of their own, and leave in another.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from operator import is_, methodcaller
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import PhaseError
from composable_fsdp.features.passages import casts, escapes, weight_writes
from composable_fsdp.features.passages.containers import Given, tensors_in
from composable_fsdp.flat.residency import UNSHARDED
from composable_fsdp.runtime.backward import (
    Arguments,
    UnitForward,
    first_number,
    sequence_number,
)
from composable_fsdp.runtime.forward import (
    NO_CONTAINERS,
    PLAIN,
    Left,
    Passage,
)
from composable_fsdp.runtime.unshard import wait_unsharded
from composable_fsdp.tree.state import _FSDPState

_LAZY_OUTPUTS = frozenset(
    (AsyncGeneratorType, CoroutineType, GeneratorType, map, filter)
)
"""Types of outputs whose computation has not begun when the forward returns."""
_SAFE = NO_CONTAINERS | {tuple}
"""Types of arguments that a forward cannot change."""
_FORWARDS = 2
"""Number of forwards of a module that search."""


class Searches:
    """Facts that only the first forwards search for, since it takes too long."""

    __slots__ = ("before", "found_at", "looks", "scans", "writes_data")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.looks = dict.fromkeys(map(id, modules), _FORWARDS)
        """Forwards that still look for ``.data`` writes and kept views, by module."""
        self.scans = self.looks.copy()
        """The same of forwards with a graph, for tensors of it on attributes."""
        self.found_at: tuple[escapes.Place, ...] = ()
        """The attributes that the searches found."""
        self.before: list[Tensor] | None = None
        """``snapshot`` of the full parameters when a forward began that checks."""
        self.writes_data = False
        """Whether forwards write through ``.data``, so that each copies its weights."""


def _count_down(left: dict[int, int], module: nn.Module) -> bool:
    """Count a forward of ``module``; return whether the forward searches."""
    number = left.pop(id(module), 0)
    if number > 1:
        left[id(module)] = number - 1
    return number > 0


class FullPassage(Passage):
    """The passage of everything; ``moves``: inputs to the compute device, too."""

    __slots__ = ("moves",)

    def __init__(self, *, moves: bool = False) -> None:
        self.moves = moves

    def without_graph(self, state: _FSDPState) -> Passage:
        """Return the passage of a forward without a graph."""
        return _choose(state, has_graph=False) if self is FIRST else self

    def enter(
        self, call: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Move, cast and alias the inputs; begin the searches of a first forward."""
        state = call.state
        call.given = given = Given()
        new: Arguments = args, kwargs
        if self.moves:
            new = given.replace(new, methodcaller("to", state.device))
        new = casts.cast_inputs(state, given, new)
        assert state.context is not None
        if call.order is state.context.order:  # not recomputed
            if len(state.handle.calls) == 1:
                _look_for_writes(state, call.module)
            if len(state.modules) > 1 and not state.remaining:
                state.remaining = frozenset(map(id, state.modules))
        given.since = sequence_number()
        if call.has_graph:
            new = given.replace(new, call.alias)
            # Backward may enter the unit through a tensor that the forward stores in a
            # container of the caller.
            if not _SAFE.issuperset(map(type, (*args, *kwargs.values()))):
                given.since, given.held = sequence_number(), new
        old, made = (*args, *kwargs.values()), (*new[0], *new[1].values())
        return None if all(map(is_, old, made)) else new

    def leave(self, state: _FSDPState, call: UnitForward, output: Any) -> Left:
        """Add what left by attributes and containers; give the caller's containers."""
        given: Given | None = call.given
        searches, precision = state.searches, state.precision
        if precision is not None and precision.output_dtype is not None:
            output = casts.cast_floating(output, precision.output_dtype)
        if type(output) in _LAZY_OUTPUTS:
            raise _lazy_output(state, output)
        since = -1 if given is None else given.since
        searches_now = call.has_graph and _count_down(searches.scans, call.module)
        # A forward that checks for writes searches in ``keep_writes``.
        checks = searches.before is not None and len(state.handle.calls) == 1
        if searches_now and not checks:
            searches.found_at = escapes.find_places(state, since, searches.found_at)
        self.keep_writes(state, call)
        output, tensors = escapes.copy_weights(state, output)
        # Backward may enter by an input that was changed in place.
        tensors += escapes.written_in_place(call.inputs, first_number(call.aliases))
        kept = [table.get(key) for table, key in searches.found_at if call.has_graph]
        if given is not None:
            kept.append(given.held)
        tensors += escapes.made_since(tensors_in(kept), since)
        if given is not None:
            output = given.give_back(output)
            call.given = None
        if self is FIRST:
            state.passage = _choose(state, has_graph=True)
        return output, tensors

    below_transforms = staticmethod(escapes.below_transforms)

    @staticmethod
    def keep_writes(state: _FSDPState, call: UnitForward) -> None:
        """Copy what the forward wrote to parameters and inputs, or keeps of these."""
        handle, searches = state.handle, state.searches
        if call.given is not None:
            call.given.write_casts_back()
        # Writes through ``.data`` leave the version counter unchanged. Two forwards
        # compare all values; if either finds a write, every later forward copies all.
        before = searches.before
        if before is not None and len(handle.calls) == 1:
            # Also of a forward that raised: attributes may keep views of weights.
            since = -1 if call.given is None else call.given.since
            searches.found_at = escapes.find_places(state, since, searches.found_at)
            searches.before = None
            now = weight_writes.snapshot(handle)
            same = now is not None and all(map(torch.equal, before, now))
            searches.writes_data |= not same
        escapes.copy_kept_weights(handle, searches.found_at)
        weight_writes.copy_writes(state, all_values=searches.writes_data)

    @staticmethod
    def after_raise(state: _FSDPState, call: UnitForward) -> None:
        """Keep in-place writes of a forward that raised, as in a plain module."""
        if (
            state.handle.residency is UNSHARDED
            and state.handle.form.readable is not None
        ):
            # The user's error matters more than a refusal of the write.
            with suppress(RuntimeError):
                FullPassage.keep_writes(state, call)
        state.searches.before = None


FIRST, FULL, MOVING = FullPassage(), FullPassage(), FullPassage(moves=True)


def _choose(state: _FSDPState, *, has_graph: bool) -> Passage:
    """Return the passage of the unit's forwards, or of those with a graph."""
    searches = state.searches
    if searches.looks or (has_graph and searches.scans):
        return FIRST
    made = state.precision
    wide = searches.writes_data or searches.found_at or len(state.modules) > 1
    wide = wide or (made is not None and made.output_dtype is not None)
    return FULL if wide or casts.input_dtype(state) is not None else PLAIN


def _look_for_writes(state: _FSDPState, module: nn.Module) -> None:
    """Begin to find writes through ``.data`` in this forward; see ``keep_writes``."""
    handle, searches = state.handle, state.searches
    searches.before = None
    if not searches.looks:
        return
    if handle.residency is not UNSHARDED:
        wait_unsharded(handle)
    looks = _count_down(searches.looks, module)
    if looks and handle.form.needs_fill:
        searches.before = weight_writes.snapshot(handle)


def _lazy_output(state: _FSDPState, output: Any) -> PhaseError:
    """Return the error of an output that would compute after the forward."""
    if isinstance(output, (CoroutineType, GeneratorType)):
        output.close()  # else Python warns that the coroutine was never awaited
    return PhaseError(
        f"The forward of fully sharded module {state.name} returned a "
        f"{type(output).__name__}, which computes when the unit is sharded again. "
        "Return tensors; a list of them, or a method that computes one result, for "
        "register_forward_method, serves a caller that iterates."
    )
