"""The order in which a tree uses its units, on this rank.

The first *round* (a forward or a backward) of a mode records the uses; later rounds are
compared with it. A rank that departs from the record meets all ranks in the store
before it sends; without a record, each use is compared by a collective. Units that send
over the same groups share a log; a unit that sends nothing in a direction has none
there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import can_compare
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef, Groups, operation_log
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import UNEVEN, note_thread
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard import meetings
from composable_fsdp.features.guard.compare import (
    SAME_CALLS,
    Announcement,
    disagreement,
    gather,
    tag_of,
)
from composable_fsdp.features.guard.meetings import (
    MOST_EVENTS,
    Order,
    order_over,
)
from composable_fsdp.features.guard.same_models import compare_models
from composable_fsdp.features.guard.watch import leave_others, require_unbroken, watch
from composable_fsdp.flat.handle import NO_LOGS, FlatParamHandle, UnitLogs
from composable_fsdp.flat.param_ref import slot_path
from composable_fsdp.naming import listed, quoted
from composable_fsdp.tree.state import ALL_RANKS, RuntimeContext, _RootFSDPState

BEGIN = "its beginning"
"""The place before the uses of a round."""

Fact: TypeAlias = tuple[str, ...]
"""What a rank does, and texts of which few differ, such as unused parameters."""

SAME_UNITS = (
    "Every rank must run the same units in the same order: decide in the model by what "
    "is equal on all ranks. If ranks use other parameters on purpose, composable_fsdp."
    "access.set_reduce_scatter_unused_params(module, True) reduces zeros for the rest."
)
SAME_ROUNDS = (
    f"{SAME_CALLS} Call the model and backward equally often and in the same mode "
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
NOTHING: Sequence[object] = (None,)
"""What a round without a record expects: ``None`` is no use, so no use matches."""
_MOST_MODES = 64
"""Number of modes whose orders are kept, the latest."""


class OrderLog:
    """The order of uses in a direction (forward or backward) over process groups."""

    __slots__ = (
        *("_behind", "_fact", "_groups", "_mode", "_name", "_order", "_records"),
        *("_sends", "_uses", "_what", "expected", "is_open", "number"),
        *("position", "round"),
    )

    def __init__(
        self,
        what: str,
        tree: str,
        order: Order,
        groups: Sequence[GroupRef] = (),
    ) -> None:
        self._order, self._groups = order, tuple(groups)
        # Whose ranks this one compares with; empty if none can.
        self.number = len(order.names)  # among the logs over its group
        self._what = what  # "forward" or "backward"
        self._name = f"a {what} of {tree} (order log {self.number})"
        order.names.append(self._name)
        self._fact = forward_fact if what == "forward" else backward_fact
        self._sends: list[Any] = []
        """The logs of the operations that a round sends."""
        self.round = 0  # the number of the current round, or of the last
        self.expected: Sequence[object] = NOTHING
        """What the record has for this round, then ``None``."""
        self.position = 0
        self.is_open = False  # whether a round is in progress
        self._uses: list[object] = []  # of this round, up to its last departure
        self._behind = 0  # index in ``expected`` of the use behind those
        self._records: dict[Hashable, list[object]] = {}  # by mode; ``None`` is the end
        self._mode: Hashable = None  # of the current round, or of the last

    def depart(self, use: object, mode: Hashable) -> None:
        """Record a use that is not the expected use, as the first of a round never is.

        Collective: without a record an all-gather of 8 bytes; else a wait in the store.
        Raises: DesyncError, if another rank does something else.
        """
        # The first use of a round has no record to compare with until the mode is
        # known.
        if not self.is_open:
            self._begin(mode)
            if self.expected[self.position] == use:
                self.position += 1
                return
        uses = self._uses
        uses += self.expected[self._behind : self.position]
        self._behind = self.position
        if self.expected is NOTHING:
            self._compare(f"use {len(uses)}", use)
        else:
            recorded = self._fact(self.expected[self.position], "")
            self._announce(f"use {len(uses)}", use, recorded)
        uses.append(use)
        self._follow(self._records.get(self._mode, ()), use)

    def end(self) -> None:
        """End the round, if any; fewer uses than recorded are a departure."""
        if not self.is_open:
            return
        if self.expected is NOTHING or self.expected[self.position] is not None:
            self.depart(None, None)
        elif self._uses:
            self._uses += self.expected[self._behind :]
        if self._uses:
            # The newest entry comes last, and the oldest goes.
            self._records.pop(self._mode, None)
            self._records[self._mode] = self._uses
            if len(self._records) > _MOST_MODES:
                del self._records[next(iter(self._records))]
        self._close()

    def drop(self) -> None:
        """Abandon the round in progress, if any; the records stay as they were."""
        # The number of further uses is not known without a record.
        if self.is_open and (
            self.expected is NOTHING or self.expected[self.position] is not None
        ):
            uses = len(self._uses) + self.position - self._behind
            self._order.raised.append(f"{self._what} {self.round} at use {uses}")
        self._close()

    def _close(self) -> None:
        """Leave the round that has ended or was abandoned."""
        self.is_open = False
        self.expected, self.position = NOTHING, 0

    def _follow(self, record: Sequence[object], use: object) -> None:
        """Expect what ``record`` has behind ``use``."""
        if use in record:
            self.expected, self.position = record, record.index(use) + 1
        else:
            self.expected, self.position = NOTHING, 0
        self._behind = self.position

    def _begin(self, mode: Hashable) -> None:
        """Begin a round: compare its begin with the expected begin, find the record."""
        order = self._order
        for each in self._sends:
            note_thread(each.threads)
        self.round += 1
        if order.raised:
            # A rank that has not abandoned the same rounds at the same uses would be in
            # a collective of such a round, with which the next of this rank would pair.
            ended = " and ".join(sorted(order.raised))
            does = f"begins {self._what} {self.round} after an exception that ended"
            self._meet(BEGIN, (ended,), f"{does} {ended}", ONE_RANK_RAISED)
            order.raised.clear()
        events, event = order.events, (self._name, mode)
        # As ``Order.note``, without a call: all ranks begin this round.
        if order.at and events[order.at] == event and len(events) < MOST_EVENTS:
            events.append(events[order.at])
            order.at += 1
        else:
            # Ranks that begin what they expect send nothing, so this rank has to wait
            # for all ranks to begin the same round.
            expected = order.expected()
            if expected is None:
                self._compare(BEGIN, mode)
            elif isinstance(expected, Call):
                self._announce(BEGIN, mode, (expected.story,))
            elif expected != event:
                other, its_mode = expected
                own = other == self._name
                recorded = self._fact(its_mode, BEGIN) if own else (other,)
                self._announce(BEGIN, mode, recorded)
            order.note(event)
        self._mode, self._uses, self._behind, self.position = mode, [], 0, 0
        self.expected = self._records.get(mode, NOTHING)
        self.is_open = True

    def _compare(self, at: str, value: Any) -> None:
        """Compare a use, or a mode (at ``BEGIN``), of all ranks, which raise together.

        Collective: an all-gather of 8 bytes over each group; if tags differ, of facts.
        """
        if not self._groups:
            return
        fact = self._fact(value, at)
        # The host cannot read a tag during the capture of a CUDA graph.
        if is_capturing():
            return self._meet(at, fact, fact[0], way_out(at))
        # The name tells trees apart that share the group and the names of units.
        tag = tag_of((self._name, at, fact))
        unlike: list[dist.ProcessGroup] = []
        for group in [each.get() for each in self._groups]:
            # After a difference in a group, this rank sends another tag to the next, so
            # that the ranks there raise, too, and do not wait for this rank.
            sent = [~tag if unlike else tag]
            why = "comparison of the order"
            tags = collectives.all_gather_numbers(collectives.TAG, sent, group, why)
            if tags.count(tags[0]) != len(tags):
                unlike.append(group)
        if not unlike:
            return
        # No rank waits for another, so that the next round needs no meeting.
        self._close()
        # All ranks of these groups have seen the difference, so all exchange objects.
        where, tree = self._place(at)
        for told in [gather((fact, (where, tree)), [group]) for group in unlike]:
            # The rounds of ranks may have other numbers.
            if len({(theirs, place[1]) for theirs, place in told.values()}) > 1:
                self._raise(difference(told, at))
        self._raise(
            f"Ranks of another process group disagree in {where}: see the error of the "
            "other ranks."
        )

    def _announce(self, at: str, value: Any, recorded: Fact) -> None:
        """Meet all ranks at a value that is not the ``recorded`` one."""
        if self._groups:
            fact = self._fact(value, at)
            does = ", where the recorded order has: ".join(contrast(fact, recorded))
            self._meet(at, fact, does, way_out(at))

    def _place(self, at: str) -> tuple[str, str]:
        return f"{self._what} {self.round}, at {at}", self._name

    def _meet(self, at: str, facts: tuple[Any, ...], does: str, cure: str) -> None:
        """Wait until every rank has come to the place with the same facts, too."""
        announced = Announcement(does, cure, self._place(at), facts)
        groups, known = [each.get() for each in self._groups], list[Any]()
        for group in groups:
            require_unbroken(group)
        try:
            for met in groups:
                meetings.meet_ranks(met, announced, self._order)
        except DesyncError as error:
            # Other ranks may follow the record and wait in a collective for this rank.
            known = [met] if error.is_known_to_all else []
            self._raise(str(error.args[0]), known)

    def _raise(
        self, text: str, known: Iterable[dist.ProcessGroup] | None = None
    ) -> NoReturn:
        """Raise ``text``, also for the ranks of other groups than ``known`` have it."""
        # Of hybrid sharding, the other replicas have seen no difference in forward, and
        # wait for this rank in the reductions.
        own = [each.get() for each in self._groups]
        leave_others(own[0], own if known is None else known, text)
        raise DesyncError(text) from None


def compare_ranks(context: RuntimeContext, root: _RootFSDPState) -> None:
    """Compare the ranks of a tree, as ``compare_models``; begin the order logs."""
    before = root.initial.compared
    # If a forward gathers nothing, a rank may run the forward alone, also with
    # gradients that are not reduced (``no_sync``). So replicas are compared in the
    # first forward that leads to a reduction.
    reduces = any(unit.settings.sync_gradients for unit in root._root_states)
    compare_models(root, replicas=reduces and torch.is_grad_enabled())
    after = root.initial.compared
    if not context.is_checked or after != before:
        # Not before the comparison: other models may have other logs, and the ranks
        # would number all later logs otherwise.
        _assign_order_logs(context, root, replicas=after == ALL_RANKS)


def _assign_order_logs(
    context: RuntimeContext, root: _RootFSDPState, *, replicas: bool
) -> None:
    """Assign the order logs of each unit of a tree; collect all logs in ``context``."""
    forward: dict[tuple[str, ...], OrderLog] = {}
    backward: dict[tuple[str, ...], OrderLog] = {}
    tree = type(root.module).__name__

    known: dict[Groups, UnitLogs] = {}
    for handle in context.handles:
        # A unit without elements sends no collective.
        if not any(region.layout.padded_numel for region in handle.layout.regions):
            handle.logs = NO_LOGS
            continue
        groups = handle.groups
        if groups.shard is None and not replicas:
            continue
        # Units with the same ``Groups`` object share the logs without another lookup.
        if groups not in known:
            gathers = [*filter(None, [groups.shard])]
            in_forward = _log(forward, "forward", tree, gathers, groups.gathering)
            present = groups.present
            in_backward = _log(backward, "backward", tree, present, groups.sending)
            # Without a shard group there is no all-gather, but gradients are reduced
            # over the replicate group.
            gathered = in_backward if gathers else None
            known[groups] = UnitLogs(in_forward, gathered, in_backward)
        handle.logs = known[groups]
    # A replica may evaluate alone, and would wait for the others.
    watch(dict.fromkeys(g for each in known for g in each.gathering), agree=True)
    watch(dict.fromkeys(g for each in known for g in each.sending), agree=replicas)
    context.forward_logs = tuple(forward.values())
    context.backward_logs = tuple(backward.values())


def _log(
    logs: dict[tuple[str, ...], OrderLog],
    what: str,
    tree: str,
    groups: Sequence[dist.ProcessGroup],
    sends: Iterable[dist.ProcessGroup],
) -> OrderLog | None:
    """Return the log for ``groups``, created at the first call; None without groups."""
    if not groups:
        return None
    # Units may have equal groups in different ``Groups`` objects.
    key = tuple([group.group_name for group in groups])
    if key not in logs:
        refs = [operation_log(group) for group in groups if can_compare(group)]
        logs[key] = OrderLog(what, tree, order_over(groups), refs)
    found = logs[key]
    # The rounds note their thread there.
    found._sends = [*dict.fromkeys((*found._sends, *map(operation_log, sends)))]
    return found


# ---- what ranks tell: facts, and how they differ, in words ----


def way_out(at: str) -> str:
    """Return the last sentences of a ``DesyncError`` at a place of a round."""
    return SAME_ROUNDS if at == BEGIN else SAME_UNITS


def difference(told: Mapping[int, tuple[Fact, tuple[str, ...]]], at: str) -> str:
    """Return the error of ranks that tell different facts, with their places."""
    texts = contrast(*[fact for fact, _ in told.values()])
    places = {rank: place for rank, (_, place) in told.items()}
    return disagreement(dict(zip(told, texts, strict=True)), places, way_out(at))


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
    return (f"runs {value.name} of {numel:,} elements",)


def backward_fact(value: Any, at: str) -> Fact:
    """Return the fact of a use in backward, or of the begin of a backward."""
    if at == BEGIN:
        forward, syncs, _, changed = value
        of = forward_fact(forward, BEGIN)[0] if forward else "begins no forward"
        does = f"begins the backward of {of.removeprefix('begins ')}"
        # Without a root there are no units, and no reductions.
        if not all(syncs) or not syncs:
            does += f", reductions off{' for some units' if any(syncs) else ''}"
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
        for name, trains, *_ in changed
    ]


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
