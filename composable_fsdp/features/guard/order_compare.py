"""Comparison of an order log with the logs of the other ranks.

Ranks that issue collectives in different orders deadlock or exchange wrong data. A
``DesyncError`` names both orders before that happens::

    compare         all ranks exchange a tag by an all-gather of 8 bytes; only if tags
                    differ, they exchange the facts behind them
    depart          this rank alone leaves the record: it meets the other ranks in the
                    store (``meetings``), who must have departed to the same use
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import Peers
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.operations import UNEVEN, leave
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.compare import (
    Announcement,
    disagreement,
    gather,
    tag_of,
)
from composable_fsdp.features.guard.meetings import history_of
from composable_fsdp.features.guard.watch import require_unbroken
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import slot_path
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
_SAME_ROUNDS = (
    "Call the model and backward on every rank equally often and in the same mode "
    "(train or eval, with or without gradients), outside of any 'if rank == 0'. "
    f"{UNEVEN}"
)
_SAME_SETTINGS = (
    "Set requires_grad of the same parameters on every rank, and change settings of "
    "units (no_sync, set_requires_gradient_sync, register_comm_hook, ..) on every "
    "rank, to the same values and before the same forward."
)
_ONE_RANK_RAISED = (
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


class OrderComparison:
    """Compares an order log over the ranks of ``peers``: a ``Peers`` per group.

    ``peers`` is empty if a comparison is not possible. In the methods, ``number`` is
    the number of the log's round and ``at`` the place in the round.
    """

    __slots__ = ("_fact", "_tree", "_waiting", "_what", "elsewhere", "peers")

    def __init__(
        self,
        peers: Sequence[Peers],
        what: str,
        tree: str,
        waiting: Callable[[], str] = str,
    ) -> None:
        self.peers = tuple(peers)
        self._what, self._tree = what, tree  # "forward", and the name of the log
        self._fact = forward_fact if what == "forward" else backward_fact
        self._waiting = waiting  # for which gradients units wait, for errors
        self.elsewhere: tuple[GroupRef, ...] = ()
        """The other groups of the tree, whose ranks would wait for this rank."""

    def compare(self, number: int, at: str, values: Sequence[Any]) -> None:
        """Compare a use, a mode (at ``BEGIN``) or all uses (at ``END``).

        Collective: an all-gather of 8 bytes over each group of ``peers``; if tags
            differ, an all-gather of objects.
        Raises: DesyncError, on every rank of a group whose ranks differ.
        """
        if not self.peers:
            return
        facts = tuple([self._fact(value, at) for value in values])
        # The host cannot read a tag during the capture of a CUDA graph.
        if is_capturing():
            does = listed(facts)
            self._meet(number, at, facts, does, way_out(facts[-1], Fact("")))
            return
        # ``tree`` tells trees apart that share the group and the names of units.
        tag = tag_of((self._what, self._tree, at, *facts))
        unlike: list[dist.ProcessGroup] = []
        for group in [each.group for each in self.peers]:
            # After a difference in a group, this rank sends another tag to the next, so
            # that the ranks there raise, too, and do not wait for this rank.
            tags = collectives.all_gather_tag(~tag if unlike else tag, group)
            if tags.count(tags[0]) != len(tags):
                unlike.append(group)
        if not unlike:
            return
        # All ranks of these groups have seen the difference, so all exchange objects.
        mine = Told(facts, self._place(number, at), self._waiting())
        for told in [gather(mine, [group]) for group in unlike]:
            # The rounds of ranks may have other numbers.
            if len({(each.facts, each.place[1]) for each in told.values()}) > 1:
                self._raise(difference(told))
        self._raise(
            f"Ranks of another process group disagree in {mine.place[0]}: see the "
            "error of the other ranks."
        )

    def depart(
        self,
        number: int,
        at: str,
        value: Any,
        wanted: Any = None,
        *,
        since: int = 0,
        other: str = "",
    ) -> None:
        """Compare a use or a mode that is not ``wanted``, recorded in round ``since``.

        ``other``: what was to begin instead of this log. Waits in the store, for a
        limited time.

        Raises: DesyncError, if another rank does something else.
        """
        if not self.peers:
            return
        fact = self._fact(value, at)
        if other:
            does = f"{fact}, where the order of earlier rounds has {other}"
            cure = _SAME_ROUNDS
        else:
            mine, recorded = contrast([fact, self._fact(wanted, at)])
            does = (
                f"{mine}{self._waiting()}, where the order recorded in {self._what} "
                f"{since} has: {recorded}"
            )
            cure = way_out(mine, recorded)
        self._meet(number, at, fact, does, cure)

    def meet_after_raise(
        self, number: int, raised: Mapping[int, tuple[int, int]]
    ) -> None:
        """Wait until every rank has abandoned the same rounds at the same uses, too.

        Raises: DesyncError, if a rank went on, or stopped at another use.
        """
        # A rank that has not would be in a collective of such a round, with which the
        # next collective of this rank would pair.
        what, logs = self._what, sorted(raised.items())
        ended = " and ".join(f"{what} {r} at use {uses}" for _, (r, uses) in logs)
        does = f"begins {what} {number} after an exception that ended {ended}"
        self._meet(number, BEGIN, (RAISED, logs), does, _ONE_RANK_RAISED)

    def _place(self, number: int, at: str) -> tuple[str, str]:
        return f"{self._what} {number}, at {at}", self._tree

    def _meet(
        self, number: int, at: str, facts: tuple[Any, ...], does: str, cure: str
    ) -> None:
        """Wait until every rank has come to the place with the same facts, too.

        Raises: DesyncError, if a rank does something else, or does not come in time.
        """
        place = self._place(number, at)
        announced = Announcement(does, does, cure, place, facts)
        groups = [each.group for each in self.peers]
        for group in groups:
            require_unbroken(group)
        try:
            for met in groups:
                history_of(met).gather(announced)
        except DesyncError as error:
            text = str(error.args[0])
            # Other ranks may follow the record and wait in a collective for this rank.
            for group in groups:
                if not (error.is_known_to_all and group is met):
                    leave(group, text)
            self._raise(text)

    def _raise(self, text: str) -> NoReturn:
        """Raise ``text``, which the ranks of ``peers`` know, also in other groups."""
        # Of hybrid sharding, the other replicas have seen no difference in forward, and
        # wait for this rank in the reductions.
        for each in self.elsewhere:
            if (group := each.ref()) is not None:
                leave(group, text)
        raise DesyncError(text) from None


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
    return _SAME_SETTINGS if is_same_call else _SAME_ROUNDS


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
