"""The most memory that a step needs, found by going through the step in integers.

The walk allocates and frees what the runtime does, in its order::

    forward    unit 0 full, 1 full, ...            resharded units freed
    backward   full k-1 ahead | gradients of k arrive, and wait for each other |
               k+1's reduction is finished | reduce buffer k, gradients move into it |
               k is reduced, and then freed

so next to full k there are the prefetched unit, its gradients as autograd made them and
one reduce buffer: k+1's before, its own after. Without prefetch k+1's is gone before k
is full. On CUDA the memory of a resharded unit is freed when the next one is resharded
or gathered ahead (see ``runtime.unshard``).

It holds for a step in the steady state, in which every unit runs once, in the plan's
order, every trainable parameter gets a gradient, and ``.grad`` was cleared. A unit that
holds others is taken to use parameters of its own both before and after them, as a root
with an embedding and a head does; where it does not, the step needs less. Activations
are the model's affair and not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from composable_fsdp.config import BackwardPrefetch

RETIRING_LIMIT = 1
"""Resharded units whose memory may wait for the GPU, with ``limit_all_gathers``."""

RETIRING_UNLIMITED = 4
"""The same without it: more overlap on small units, more memory."""


class UnitMemory(NamedTuple):
    """Bytes of one unit's buffers, and what decides when they live.

    ``temporary``: what a reduction writes to when it is not the gradient itself.
    ``gradients``: of all parameters, in the compute dtype; ``early``: of those whose
    gradients are there before those of units inside; ``reduced``: of the reduced ones
    that the rank keeps until they are cleared. ``parent``: the unit around it, -1 for
    the root. ``fed``: its inputs need gradients, as there is something to train before
    it. ``ahead``: its forward gathers the unit after it.
    """

    name: str
    parent: int
    full: int
    reduce: int
    temporary: int
    gradients: int
    early: int
    reduced: int
    sends: bool
    in_backward: bool
    fed: bool
    reshards: bool
    prefetch: BackwardPrefetch | None
    gathers: bool
    ahead: bool
    retiring_limit: int


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes on the compute device of one rank, at the moment when they are most.

    ``parameters``: what the rank keeps. ``gradients``: reduced, of the units that
    backward has come by. ``full``: units that are full, on their way, or not freed yet.
    ``reduce``: buffers that gradients arrive in or are reduced from and to.
    ``in_flight``: gradients that arrive. ``optimizer``: states, if asked for. ``when``:
    the moment, for a reader.
    """

    parameters: int
    gradients: int
    full: int
    reduce: int
    in_flight: int
    optimizer: int
    when: str

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.parameters
            + self.gradients
            + self.full
            + self.reduce
            + self.in_flight
            + self.optimizer
        )


class Moment(NamedTuple):
    """Bytes that come and go in a step, at one moment."""

    full: int = 0
    reduce: int = 0
    in_flight: int = 0
    gradients: int = 0
    when: str = "between steps"


def peak_of_step(units: Sequence[UnitMemory], *, streams: bool) -> Moment:
    """The moment of a step at which the units' buffers take most.

    ``streams``: as on CUDA; else as on CPU, where a reshard frees at once.
    """
    step = _Step(units, streams=streams)
    events = _events(units)
    gathered = [index for index, unit in enumerate(units) if unit.gathers]
    following = dict(pairwise(gathered))
    for index, enters in events:
        if enters:
            step.unshard(index, "forward")
            if units[index].ahead and index in following:
                step.unshard_ahead(following[index])
        elif units[index].reshards or not units[index].in_backward:
            step.reshard(index)
    order = [i for i, enters in events if not enters and units[i].in_backward]
    before = dict(zip(order[1:], order, strict=False))
    coming: int | None = None
    for index, enters in reversed(events):
        if not units[index].in_backward:
            continue
        if enters:
            step.end_backward(index, coming)
        else:
            coming = before.get(index)
            step.begin_backward(index, coming)
    return step.most


def _events(units: Sequence[UnitMemory]) -> list[tuple[int, bool]]:
    """Units as forward enters (True) and leaves (False) them."""
    events: list[tuple[int, bool]] = []
    inside: list[int] = []
    for index, unit in enumerate(units):
        while inside and inside[-1] != unit.parent:
            events.append((inside.pop(), False))
        inside.append(index)
        events.append((index, True))
    events.extend((index, False) for index in reversed(inside))
    return events


class _Step:
    """What is alive; its methods do to integers what the runtime does to buffers."""

    def __init__(self, units: Sequence[UnitMemory], *, streams: bool) -> None:
        self.units, self.streams = units, streams
        self.gathered: set[int] = set()
        self.retiring: deque[int] = deque()
        self.full = self.reduce = self.early = self.reduced = 0
        self.reducing = 0
        """Bytes of the reduction in flight."""
        self.most = Moment()

    def _note(self, when: str, index: int, gradients: int = 0) -> None:
        now = (self.full, self.reduce, self.early + gradients, self.reduced)
        if sum(now) > sum(self.most[:4]):
            self.most = Moment(*now, f"{when} of {self.units[index].name}")

    def _is_full(self, index: int) -> bool:
        return index in self.gathered and index not in self.retiring

    def unshard(self, index: int, when: str) -> None:
        unit = self.units[index]
        if not unit.full or self._is_full(index):
            return
        if index in self.retiring:
            self.retiring.remove(index)
        else:
            self.gathered.add(index)
            self.full += unit.full
        self._note(when, index)

    def unshard_ahead(self, index: int) -> None:
        if self.units[index].full and not self._is_full(index):
            self._make_room(index)
            self.unshard(index, "forward")

    def _make_room(self, index: int) -> None:
        self._retire(keep=self.units[index].retiring_limit - 1)

    def reshard(self, index: int) -> None:
        if index not in self.gathered or index in self.retiring:
            return
        if self.streams:
            self.retiring.append(index)
            self._retire(keep=self.units[index].retiring_limit)
        else:
            self._free(index)

    def _retire(self, *, keep: int) -> None:
        while len(self.retiring) > keep:
            self._free(self.retiring.popleft())

    def _free(self, index: int) -> None:
        self.gathered.remove(index)
        self.full -= self.units[index].full

    def begin_backward(self, index: int, before: int | None) -> None:
        unit = self.units[index]
        if unit.prefetch is None and unit.full and not self._is_full(index):
            self.reduce -= self.reducing
            self.reducing = 0
        self.unshard(index, "backward")
        ahead = unit.prefetch is BackwardPrefetch.BACKWARD_PRE
        if ahead and before is not None:
            self.unshard(before, "backward")
        self.early += unit.early

    def end_backward(self, index: int, before: int | None) -> None:
        unit = self.units[index]
        self.early -= unit.early
        self._note("backward", index, unit.gradients)
        # The root stays full until backward is over, and so does a unit whose inputs
        # need no gradient and cannot say when they are done.
        if unit.parent >= 0 and unit.fed:
            self.reshard(index)
            self._make_room(index)
        behind = unit.prefetch is BackwardPrefetch.BACKWARD_POST
        if behind and before is not None:
            self.unshard(before, "backward")
        if unit.reduce:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        unit = self.units[index]
        self.reduce += unit.reduce - self.reducing
        self._note("reduction", index, unit.gradients)
        self.reduce += unit.temporary
        self.reduced += unit.reduced
        self._note("reduction", index)
        self.reducing = unit.reduce + unit.temporary
        if not self.streams and not unit.sends:
            self.reduce -= self.reducing
            self.reducing = 0
