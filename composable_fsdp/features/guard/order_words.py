"""What ranks tell of the order of their units: facts, and how they differ, in words."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from composable_fsdp.comm.operations import UNEVEN
from composable_fsdp.features.guard.compare import disagreement
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import slot_path
from composable_fsdp.naming import listed, quoted
from composable_fsdp.tree.state import RuntimeContext

BEGIN, END = "its beginning", "its end"
"""Places in a round; uses are between them."""

USE, BEGINS, RAISED = "use", "begins", "raised"
"""Kinds of facts: a use of a unit or all uses of a round, the begin of a round, and the
begin after rounds that an exception has ended."""

_SAME_UNITS = (
    "Every rank must run the same units in the same order: decide in the model by what "
    "is equal on all ranks. If ranks use other parameters on purpose, composable_fsdp."
    "access.set_reduce_scatter_unused_params(module, True) reduces zeros for the rest."
)
SAME_ROUNDS = (
    "Call the model and backward on every rank equally often and in the same mode "
    "(train or eval, with or without gradients), outside of any 'if rank == 0'. "
    f"{UNEVEN}"
)
_SAME_SETTINGS = (
    "Set requires_grad of the same parameters on every rank, and change settings of "
    "units (no_sync, set_requires_gradient_sync, register_comm_hook, ..) on every "
    "rank, to the same values and before the same forward."
)
ONE_RANK_RAISED = (
    "If a rank catches an exception of a forward or a backward and goes on, every rank "
    "has to leave the same forward or backward at the same place: let the ranks agree "
    "(an all-reduce of a flag) whether a sample is skipped before they call the model, "
    "or let the exception end the program."
)


class Fact(NamedTuple):
    """An action of a rank in words, in the form in which ranks compare it."""

    does: str
    """As ``"runs 'blocks.2'"``."""
    kind: str = USE
    of: str = ""
    """The forward that begins."""
    named: tuple[str, ...] = ()
    """Texts of which usually few differ: parameters without a gradient, and, at the
    begin of a round, changed flags and settings."""

    def __str__(self) -> str:
        return self.does + (f", with {listed(self.named)}" if self.named else "")


class Told(NamedTuple):
    """What a rank tells of facts that differ: all uses of a round, or one fact."""

    facts: tuple[Fact, ...]
    place: tuple[str, ...]
    waiting: str


def difference(told: Mapping[int, Told]) -> str:
    """Return the error of ranks that tell different facts of a place."""
    orders = [each.facts for each in told.values()]
    # The end of a round is a use, too, so one order is no part of the other.
    pairs = list(enumerate(zip(*orders, strict=False)))
    # The trees alone may differ.
    index, unlike = next((p for p in pairs if len(set(p[1])) > 1), pairs[0])
    places = {rank: each.place for rank, each in told.items()}
    if max(map(len, orders)) > 1:
        at = f"use {index} (found at its end)"
        places = {r: (p.replace(END, at), tree) for r, (p, tree) in places.items()}
    facts = contrast(unlike)
    does = {
        rank: f"{fact}{each.waiting}"
        for (rank, each), fact in zip(told.items(), facts, strict=True)
    }
    other = next((each for each in facts if each != facts[0]), facts[0])
    return disagreement(does, places, way_out(facts[0], other))


def contrast(facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts without the texts that all of them name.

    >>> facts = [Fact("reduces a", named=("x", "y")), Fact("reduces a", named=("y",))]
    >>> [str(fact) for fact in contrast(facts)]
    ['reduces a, with x', 'reduces a']
    """
    common = set.intersection(*(set(each.named) for each in facts))
    return [
        each._replace(named=tuple(name for name in each.named if name not in common))
        for each in facts
    ]


def way_out(mine: Fact, theirs: Fact) -> str:
    """Return the last sentences of a ``DesyncError``: the way to equal facts."""
    if BEGINS not in (mine.kind, theirs.kind):
        return _SAME_UNITS
    # The same call of the model: only flags and settings tell the two apart.
    is_same_call = mine.of == theirs.of or mine.named or theirs.named
    return _SAME_SETTINGS if is_same_call else SAME_ROUNDS


def forward_fact(value: Any, at: str) -> Fact:
    """Return the fact of a use in forward, or of the begin of a forward."""
    if at == BEGIN:
        fqn, training, grads, changed = value
        how = "training" if training else "eval", "with" if grads else "without"
        of = f"a forward of {quoted(fqn)} in {how[0]} mode {how[1]} gradients"
        return Fact(f"begins {of}", BEGINS, of, _flags(changed))
    if value is None:
        return Fact("has no further unit to run")
    # The size lets ranks with models of different shapes raise before a collective.
    regions = value.layout.regions
    numel = sum(region.layout.padded_numel for region in regions)
    does = f"runs {value.name} of {numel:,} elements"
    if len(regions) > 1:
        # ``group_by`` may return different groups on different ranks (for example
        # ``hash`` of a string); the sizes may be equal in spite of that.
        members = [[s.fqns for s in r.layout.parameters] for r in regions]
        digest = zlib.crc32(repr(members).encode())
        does += f" in {len(regions)} regions (grouping {digest:08x})"
    return Fact(does)


def backward_fact(value: Any, at: str) -> Fact:
    """Return the fact of a use in backward, or of the begin of a backward."""
    if at == BEGIN:
        forward, syncs, structures, changed = value
        of = forward_fact(forward, BEGIN).of if forward else "no forward"
        does = f"begins the backward of {of}"
        # Without a root there are no units, and no reductions.
        if not all(syncs) or not syncs:
            does += f", reductions off{' for some units' if any(syncs) else ''}"
        if rebuilt := sum(map(bool, structures)):
            digest = zlib.crc32(repr(structures).encode())
            does += f", with requires_grad changed in {rebuilt} units ({digest:08x})"
        return Fact(does, BEGINS, of, _flags(changed))
    if value is None:
        return Fact("has no further backward or reduction")
    if isinstance(value, FlatParamHandle):
        return Fact(f"runs the backward of {value.name}")
    handle, structure, arrived = value
    does = f"reduces the gradients of {handle.name}"
    # The unit was rebuilt since, so the flags no longer match its regions.
    if structure != handle.layout.structure:
        return Fact(f"{does}, grouped as they were")
    missing = _without_gradient(handle, arrived)
    return Fact(does, named=tuple([f"no gradient for {quoted(n)}" for n in missing]))


def _flags(changed: Iterable[Sequence[Any]]) -> tuple[str, ...]:
    """Return the entries of ``RuntimeContext.changed_flags`` in words."""
    return tuple(
        [
            name if trains is None else f"requires_grad={trains} of {quoted(name)}"
            for name, trains, *_ in changed
        ]
    )


def missing_gradients(ref: weakref.ref[RuntimeContext]) -> str:
    """Return for which gradients the units in backward wait, for errors."""
    context, missing = ref(), list[str]()
    for task, states in context.tasks.items() if context is not None else ():
        for handle in [state.handle for state in states]:
            # The unit may have joined another graph task since.
            if handle.backward.task == task and handle.reduction.due:
                arrived = [region.reduce.arrived for region in handle.layout.trainable]
                missing += _without_gradient(handle, arrived)
    return f" and has no gradient yet for {listed(map(quoted, missing))}" * any(missing)


def _without_gradient(
    handle: FlatParamHandle, arrived: Sequence[bytes | bytearray]
) -> list[str]:
    """Return the FQNs from the root of parameters without a gradient on this rank."""
    return [
        slot_path(handle, slot)
        for region, hits in zip(handle.layout.trainable, arrived, strict=True)
        # Usually every gradient has arrived; then the parameters are not visited.
        if 0 in hits
        for slot, hit in zip(region.layout.parameters, hits, strict=True)
        if not hit
    ]
