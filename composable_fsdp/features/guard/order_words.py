"""What ranks tell of the order of their units: facts, and how they differ, in words."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from composable_fsdp.comm.operations import UNEVEN
from composable_fsdp.features.guard.compare import disagreement
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import slot_path
from composable_fsdp.naming import listed, quoted
from composable_fsdp.tree.state import RuntimeContext

BEGIN, END = "its beginning", "its end"
"""Places in a round; uses are between them."""

Fact: TypeAlias = tuple[str, ...]
"""What a rank does, as ``"runs 'blocks.2'"``, and texts of which usually few differ:
parameters without a gradient, and, at the begin of a round, changed flags and
settings."""

SAME_UNITS = (
    "Every rank must run the same units in the same order: decide in the model by what "
    "is equal on all ranks. If ranks use other parameters on purpose, composable_fsdp."
    "access.set_reduce_scatter_unused_params(module, True) reduces zeros for the rest."
)
SAME_ROUNDS = (
    "Call the model and backward on every rank equally often and in the same mode "
    "(train or eval, with or without gradients), outside of any 'if rank == 0'. "
    "Set requires_grad of the same parameters on every rank, and settings of units "
    "(no_sync, set_requires_gradient_sync, register_comm_hook, ..) to the same values "
    f"before the same forward. {UNEVEN}"
)
ONE_RANK_RAISED = (
    "If a rank catches an exception of a forward or a backward and goes on, every rank "
    "has to leave the same forward or backward at the same place: let the ranks agree "
    "(an all-reduce of a flag) whether a sample is skipped before they call the model, "
    "or let the exception end the program."
)


def way_out(at: str) -> str:
    """Return the last sentences of a ``DesyncError`` at a place of a round."""
    return SAME_ROUNDS if at == BEGIN else SAME_UNITS


class Told(NamedTuple):
    """What a rank tells of facts that differ: all uses of a round, or one fact."""

    facts: tuple[Fact, ...]
    place: tuple[str, ...]
    waiting: str


def difference(told: Mapping[int, Told], at: str) -> str:
    """Return the error of ranks that tell different facts of a place."""
    # The end of a round is a use, too, so one order is no part of the other.
    pairs = list(enumerate(zip(*[each.facts for each in told.values()], strict=False)))
    # The trees alone may differ.
    index, unlike = next((p for p in pairs if len(set(p[1])) > 1), pairs[0])
    places = {rank: each.place for rank, each in told.items()}
    if at == END:
        use = f"use {index} (found at its end)"
        places = {r: (p.replace(END, use), tree) for r, (p, tree) in places.items()}
    does = {
        rank: f"{text}{each.waiting}"
        for (rank, each), text in zip(told.items(), contrast(*unlike), strict=True)
    }
    return disagreement(does, places, way_out(at))


def contrast(*facts: Fact) -> list[str]:
    """Return the facts in words, without the texts that all of them name.

    >>> contrast(("reduces a", "x", "y"), ("reduces a", "y"))
    ['reduces a, with x', 'reduces a']
    """
    common = set.intersection(*(set(named) for _, *named in facts))
    own = [(does, [n for n in named if n not in common]) for does, *named in facts]
    return [f"{does}, with {listed(named)}" if named else does for does, named in own]


def forward_fact(value: Any, at: str) -> Fact:
    """Return the fact of a use in forward, or of the begin of a forward."""
    if at == BEGIN:
        fqn, training, grads, changed = value
        how = "training" if training else "eval", "with" if grads else "without"
        of = f"a forward of {quoted(fqn)} in {how[0]} mode {how[1]} gradients"
        return f"begins {of}", *_flags(changed)
    if value is None:
        return ("has no further unit to run",)
    # The size lets ranks with models of different shapes raise before a collective.
    regions = value.layout.regions
    numel = sum([region.layout.padded_numel for region in regions])
    does = f"runs {value.name} of {numel:,} elements"
    return (does,)


def backward_fact(value: Any, at: str) -> Fact:
    """Return the fact of a use in backward, or of the begin of a backward."""
    if at == BEGIN:
        forward, syncs, structures, changed = value
        of = forward_fact(forward, BEGIN)[0] if forward else "begins no forward"
        does = f"begins the backward of {of.removeprefix('begins ')}"
        # Without a root there are no units, and no reductions.
        if not all(syncs) or not syncs:
            does += f", reductions off{' for some units' if any(syncs) else ''}"
        if rebuilt := sum(map(bool, structures)):
            digest = zlib.crc32(repr(structures).encode())
            does += f", with requires_grad changed in {rebuilt} units ({digest:08x})"
        return does, *_flags(changed)
    if value is None:
        return ("has no further backward or reduction",)
    if isinstance(value, FlatParamHandle):
        return (f"runs the backward of {value.name}",)
    handle, structure, arrived = value
    does = f"reduces the gradients of {handle.name}"
    # The unit was rebuilt since, so the flags no longer match its regions.
    if structure != handle.layout.structure:
        return (f"{does}, grouped as they were",)
    missing = _without_gradient(handle, arrived)
    return does, *[f"no gradient for {quoted(name)}" for name in missing]


def _flags(changed: Iterable[Sequence[Any]]) -> list[str]:
    """Return the entries of ``RuntimeContext.changed_flags`` in words."""
    return [
        name if trains is None else f"requires_grad={trains} of {quoted(name)}"
        for name, trains in changed
    ]


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
