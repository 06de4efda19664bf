"""Computes the peak memory of a training step by running the step on integers.

The walk allocates and frees in the order of the runtime, in the steady state: every
unit runs once, every trainable parameter gets a gradient, ``.grad`` was cleared before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from operator import or_
from typing import NamedTuple

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.options import RETIRING_LIMIT, RETIRING_UNLIMITED
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.memory import Memory, StepMoment, slot_bytes

GATHER, COMPUTE, REDUCE, FREE = "all-gather", "compute", "reduce", "free"
"""Kinds of an ``Event``. Casts and copies of a unit of a single rank are gathers."""


class Event(NamedTuple):
    """An operation of a unit in "forward" or "backward"."""

    phase: str
    unit: str
    is_entry: bool = True
    """Of ``COMPUTE`` around nested units: forward before, backward after them."""
    kind: str = COMPUTE


class Slot(NamedTuple):
    """Memory that units use in turn: its bytes, and the indices of the units."""

    nbytes: int
    units: tuple[int, ...]


class StepMemory(NamedTuple):
    """The bytes that a step allocates and frees, by operation, and all slots."""

    moments: tuple[StepMoment, ...]
    slots: tuple[Slot, ...] = ()

    @property
    def kept(self) -> int:
        """Bytes of all slots, which stay between steps."""
        return sum(slot.nbytes for slot in self.slots)


class _Unit:
    """Bytes of a unit's buffers, and the facts that determine their lifetimes."""

    # ``parent`` is the index of the enclosing unit, -1 for the root; gradients flow
    # through a unit ``in_backward``; inputs of a unit that is ``fed`` need gradients.
    def __init__(
        self, plan: UnitPlan, parent: int, in_backward: bool, fed: bool, streams: bool
    ) -> None:
        self.plan, self.parent = plan, parent
        self.in_backward, self.fed = in_backward, fed
        self.reshards = plan.reshards and parent >= 0
        self.full = plan.full_bytes
        self.wire = sum(r.wire_nbytes for r in plan.regions)
        # On CPU a copy from the host casts on the way, without a tensor of its own.
        on_host = plan.is_offloaded and streams
        # Temporaries of the encoding, or of a cast of offloaded shards. Regions are
        # encoded, or copied and cast, in turn; the device casts what was copied.
        self.scratch = max(
            (
                (r.wire.scratch_nbytes(r.wire_layout, r.dtype) if r.wire else 0)
                + on_host * r.shard_numel * r.dtype.itemsize
                for r, d in plan.with_dtypes
                if r.wire or d.compute != r.dtype
            ),
            default=0,
        )
        self.buffers = plan.reduce_bytes
        # The output of a reduction, before a cast or a copy. With equal dtypes and
        # without offload, the reduction writes into the sharded gradient itself, unless
        # the output is more than that.
        others = plan.is_offloaded or plan.gradient_ranks < plan.shard_world_size
        casts = [(r, d) for r, d in plan.reduced if d.reduce != d.gradient]
        self.output = sum(
            r.padded_numel // plan.gradient_ranks * d.reduce.itemsize
            for r, d in (plan.reduced if others else casts)
        )
        # Before a gradient is copied to the host, the device casts, region by region.
        landing = [on_host * r.shard_numel * d.gradient.itemsize for r, d in casts]
        self.brief = max(landing, default=0)
        # Sharded gradients that stay until ``zero_grad``; offloaded ones have host
        # memory of their own permanently.
        self.kept = 0 if plan.is_offloaded else plan.gradient_bytes
        self.gradients, self.early = _gradients(plan)
        # Resharded units whose memory may wait for the GPU.
        limited = plan.options.limit_all_gathers
        self.retiring_limit = RETIRING_LIMIT if limited else RETIRING_UNLIMITED


def _gradients(plan: UnitPlan) -> tuple[int, int]:
    """Return the bytes of all gradients, and of those made before a nested unit's."""
    nbytes = {
        slot.index: slot.numel * d.compute.itemsize
        for r, d in plan.reduced
        for slot in r.parameters
    }
    # That of the parameter which forward uses first, the first of the unit, comes last.
    # That of a tied parameter is summed from the last use in forward on.
    last = min(nbytes, default=0)
    tied = {s.index for r in plan.regions for s in r.parameters if s.fqns[1:]}
    every = sum(nbytes.values())
    return every, every - (0 if last in tied else nbytes.get(last, 0))


def parents_of(units: Sequence[UnitPlan]) -> list[int]:
    """Return, per unit, the index of the enclosing unit; -1 for the root."""
    parents: list[int] = []
    # Units come in ``.modules()`` order, so the enclosing units form a stack.
    inside = [(-1, "")]
    for index, unit in enumerate(units):
        while not unit.fqn.startswith(inside[-1][1]):
            inside.pop()
        parents.append(inside[-1][0])
        inside.append((index, f"{unit.fqn}." if unit.fqn else ""))
    return parents


def flows_of(units: Sequence[UnitPlan]) -> list[bool]:
    """Return whether gradients flow through each unit."""
    # Backward runs until the first trainable unit in forward order, so gradients flow
    # through every unit after that unit, frozen units included.
    return list(accumulate((unit.is_trainable for unit in units), or_))


def memory_of_step(
    plans: Sequence[UnitPlan], held: Memory, *, streams: bool
) -> StepMemory:
    """Return the bytes of buffers and ``held`` at each operation of a step."""
    flows = flows_of(plans)
    # Inputs need gradients if a trainable unit precedes in forward order.
    facts = zip(plans, parents_of(plans), flows, [False, *flows], strict=False)
    units = [_Unit(*each, streams) for each in facts]
    slots: tuple[Slot, ...] = ()
    if any(plan.options.arena for plan in plans):
        # Once to learn which units are full at the same time, and so share no slot.
        step = _Step(units, held, slots, streams=streams)
        _walk(step)
        slots = _assign_slots(plans, step.together)
    return StepMemory(_walk(_Step(units, held, slots, streams=streams)), slots)


def _assign_slots(
    plans: Sequence[UnitPlan], together: Collection[tuple[int, int]]
) -> tuple[Slot, ...]:
    """Give each unit with an arena the first slot that is free while it is full."""
    sizes = [slot_bytes(plan.full_regions) for plan in plans]
    arenas = [plan.options.arena for plan in plans]
    found: list[list[int]] = []
    # A slot is as large as its first unit. Sorting is stable: units of equal bytes stay
    # in forward order.
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        arena = arenas[index]
        if arena is None or not sizes[index]:
            continue
        for units in found if arena.shared else ():
            if arenas[units[0]] == arena and not any(
                (index, other) in together for other in units
            ):
                units.append(index)
                break
        else:
            found.append([index])
    return tuple(Slot(sizes[units[0]], tuple(units)) for units in found)


def _walk(step: _Step) -> tuple[StepMoment, ...]:
    """Run the step; return all operations."""
    # The calls below have the order of the runtime's calls. While unit k is unsharded
    # in backward, memory also holds k's gradients as autograd made them, and the
    # prefetched unit, in the place of k+1's reduce buffer.
    # A unit with nested units counts as using own parameters both before and after the
    # nested units, as a root with an embedding and a head does. If the unit does not,
    # the step needs less than the result.
    units = step.units
    events = _events(units)
    parents = {unit.parent for unit in units}
    gathers = [i for i, u in enumerate(units) if u.plan.shard_world_size > 1 and u.full]
    following = dict(pairwise(gathers))
    for index, enters in events:
        unit = units[index]
        if enters:
            step.unshard(index)
            if unit.plan.options.forward_prefetch and index in following:
                step.unshard_ahead(following[index])
        # The unit computes again behind its nested units, as a root with a head does.
        if enters or index in parents:
            step.tell(COMPUTE, index, is_entry=enters)
        if not enters and (unit.reshards or not unit.in_backward):
            step.reshard(index)
    _walk_back(step, events, parents)
    step.end_task()
    return tuple(step.told)


def _walk_back(
    step: _Step, events: Sequence[tuple[int, bool]], parents: set[int]
) -> None:
    """Run backward."""
    units = step.units
    # Backward visits the units in the reverse order of the ends of their forwards.
    order = [i for i, enters in events if not enters and units[i].in_backward]
    before = dict(zip(order[1:], order, strict=False))
    entered = 0
    # The unit that ``begin_backward`` or ``end_backward`` gathers ahead.
    coming: int | None = None
    step.phase = "backward"
    for index, enters in reversed(events):
        if not units[index].in_backward:
            continue
        if enters:
            step.end_backward(index, coming, is_tail=entered == len(order))
        else:
            entered += 1
            coming = before.get(index)
            step.begin_backward(index, coming)
            if index in parents:
                step.tell(COMPUTE, index, is_entry=False)


def _events(units: Sequence[_Unit]) -> list[tuple[int, bool]]:
    """Return (unit, True) per entry of forward, and (unit, False) per exit."""
    events: list[tuple[int, bool]] = []
    inside: list[int] = []
    for index, unit in enumerate(units):
        while inside and inside[-1] != unit.parent:
            events.append((inside.pop(), False))
        inside.append(index)
        events.append((index, True))
    return events + [(index, False) for index in reversed(inside)]


class _Step:
    """The buffers that are allocated; methods do to them what the runtime does."""

    def __init__(
        self,
        units: Sequence[_Unit],
        held: Memory,
        slots: Sequence[Slot],
        *,
        streams: bool,
    ) -> None:
        self.units, self.streams = units, streams
        # Bytes by field of ``Memory``, and by what a unit has allocated.
        self.total = Counter(held.by_kind())
        self.total.update(full=sum(slot.nbytes for slot in slots))
        self.live: dict[tuple[str, str, int], int] = {}
        # A unit in a slot allocates nothing.
        self.in_slots = {index for slot in slots for index in slot.units}
        # Pairs of units that are full at the same time.
        self.together: set[tuple[int, int]] = set()
        # Units with memory for full parameters. ``retiring`` holds the resharded units
        # that are not freed yet, oldest first.
        self.gathered: set[int] = set()
        self.retiring: list[int] = []
        # The only reduction in flight, and the one whose output an all-reduce writes.
        self.reducing: int | None = None
        self.replicating: int | None = None
        # Units whose all-gather was issued ahead, until their own forward or backward.
        self.ahead: set[int] = set()
        # Units that were resharded with a backward to come, which awaits their pieces.
        self.awaited: set[int] = set()
        # Units that are reduced when the graph task has ended.
        self.late: list[int] = []
        self.phase = "forward"
        self.told: list[StepMoment] = []

    def take(self, field: str, what: str, index: int, nbytes: int) -> None:
        """Allocate a buffer of unit ``index``."""
        self.live[field, what, index] = nbytes
        self.total[field] += nbytes

    def give(self, field: str, what: str, index: int | None) -> None:
        """Free a buffer of unit ``index``, if it is there."""
        if index is not None:
            self.total[field] -= self.live.pop((field, what, index), 0)

    def tell(
        self,
        kind: str,
        index: int,
        *,
        is_entry: bool = True,
        when: str | None = None,
        gradients: int = 0,
    ) -> None:
        """Add an event with the present bytes."""
        unit = self.units[index].plan.fqn
        ahead = sum(self.units[each].full for each in self.ahead)
        now = Memory(**self.total, when=f"{when or self.phase} of {unit or ROOT_NAME}")
        memory = now._replace(
            full=now.full - ahead, ahead=ahead, in_flight=now.in_flight + gradients
        )
        self.told.append(StepMoment(memory, Event(self.phase, unit, is_entry, kind)))

    def unshard(self, index: int, *, ahead: bool = False) -> None:
        """Allocate the full parameters of unit ``index``, if sharded."""
        unit = self.units[index]
        # A unit that was gathered ahead is in use from here on.
        if not ahead:
            self.ahead.discard(index)
        if unit.full and (index not in self.gathered or index in self.retiring):
            if ahead:
                self.ahead.add(index)
            # The all-gather takes what it can of the reduction in flight.
            if not self.streams:
                self._finish_reduction()
            self.give("reduce", "buffers", self.reducing)
            # Resharded, but not freed yet: the same memory is used again.
            if index in self.retiring:
                self.retiring.remove(index)
                self._keep_piece(index)
            else:
                for other in self.gathered:
                    self.together |= {(index, other), (other, index)}
                self.gathered.add(index)
                size = 0 if index in self.in_slots else unit.full
                self.take("full", "full", index, size)
            self.take("full", "wire", index, unit.wire)
            self.take("full", "scratch", index, unit.scratch)
            self.tell(GATHER, index)
            self.give("full", "scratch", index)
        # With streams the decoding follows the all-gather; on CPU the host decodes when
        # the unit is used.
        if self.streams or not ahead:
            self.give("full", "wire", index)

    def unshard_ahead(self, index: int) -> None:
        """Gather unit ``index`` ahead; if the limit is reached, free a unit first."""
        retired = index not in self.gathered or index in self.retiring
        if self.units[index].full and retired:
            self._retire(keep=self.units[index].retiring_limit - 1)
            self.unshard(index, ahead=True)

    def reshard(self, index: int) -> None:
        """Free the full parameters of unit ``index``; with streams, free them late."""
        unit = self.units[index]
        if unit.plan.stays_full and self.phase == "backward":
            return
        if index in self.gathered and index not in self.retiring:
            self.awaited.discard(index)
            keeps = unit.plan.piece_ranks and not unit.plan.has_rest
            if keeps and unit.in_backward and self.phase == "forward":
                self.awaited.add(index)
            # On CUDA the compute stream may still read the memory, so the unit waits
            # until a later unit is resharded or gathered ahead; see
            # ``runtime.unshard``.
            self.retiring.append(index)
            self._retire(keep=unit.retiring_limit if self.streams else 0)

    def _retire(self, *, keep: int) -> None:
        """Free the oldest resharded units until ``keep`` units wait."""
        while len(self.retiring) > keep:
            index = self.retiring.pop(0)
            self._keep_piece(index)
            self.gathered.remove(index)
            self.give("full", "full", index)
            self.tell(FREE, index)

    def _keep_piece(self, index: int) -> None:
        """Copy what stays of unit ``index`` until its backward, or free it behind."""
        self.give("full", "piece", index)
        if index in self.awaited:
            self.take("full", "piece", index, self.units[index].plan.piece_bytes)
            self.tell(FREE, index)

    def begin_backward(self, index: int, before: int | None) -> None:
        """Unshard unit ``index``; with BACKWARD_PRE, gather unit ``before``."""
        unit = self.units[index]
        self.unshard(index)
        ahead = unit.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        if ahead and before is not None:
            self.unshard(before, ahead=True)
        self.take("in_flight", "early", index, unit.early)

    def end_backward(self, index: int, before: int | None, *, is_tail: bool) -> None:
        """Reshard and reduce unit ``index``; BACKWARD_POST gathers ``before``."""
        unit = self.units[index]
        self.give("in_flight", "early", index)
        self.tell(COMPUTE, index, gradients=unit.gradients)
        # The root stays unsharded until the end of backward. So does a unit whose
        # inputs need no gradient: no hook tells when the unit's backward is done.
        if unit.parent >= 0 and unit.fed:
            self.reshard(index)
            self._retire(keep=unit.retiring_limit - 1)
        elif is_tail:
            # No unit is left to enter: reduced when the graph task has ended.
            self.take("in_flight", "late", index, unit.gradients)
            self.late.append(index)
            return
        post = unit.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        self._reduce(index, before if post else None)

    def end_task(self) -> None:
        """Reshard all units, and reduce those that no hook has reduced."""
        for index in range(len(self.units)):
            self.reshard(index)
        self._retire(keep=0)
        for index in self.late:
            self.give("in_flight", "late", index)
            self._reduce(index, None)

    def _reduce(self, index: int, ahead: int | None) -> None:
        """Move the gradients of unit ``index`` and reduce; gather unit ``ahead``."""
        unit = self.units[index]
        if unit.buffers:
            if ahead is None:
                self._finish_reduction()
            # The gradients move into the reduce buffers, before an all-gather.
            self.take("reduce", "buffers", index, unit.buffers)
            self.tell(REDUCE, index, when="reduction", gradients=unit.gradients)
        if ahead is not None:
            self.unshard(ahead, ahead=True)
        if not unit.buffers:
            return
        if ahead is not None:
            self._finish_reduction()
        self.take("reduce", "output", index, unit.output)
        self.take("reduce", "brief", index, unit.brief)
        self.take("gradients", "kept", index, unit.kept)
        self.tell(REDUCE, index, when="reduction")
        self.give("reduce", "brief", index)
        self.reducing = index
        # A reduction of a single rank on CPU is finished at once.
        if not self.streams and unit.plan.shard_world_size * unit.plan.replicas == 1:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        """Free the reduction in flight, and outputs kept for the last all-reduce."""
        done, self.reducing = self.reducing, None
        self.give("reduce", "output", self.replicating)
        self.replicating = None
        if done is not None:
            self.give("reduce", "buffers", done)
            plan = self.units[done].plan
            if self.streams and plan.gradient_ranks > 1 and plan.sum_ranks > 1:
                self.replicating = done
            else:
                self.give("reduce", "output", done)
