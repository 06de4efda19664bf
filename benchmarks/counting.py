"""Exact counts of one training step: calls that Python sees, operators, collectives.

No clock is read, so the numbers are the same on every machine with the same torch and
Python, and a test can hold them (``tests/test_host_overhead.py``).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import warm_trainee
from benchmarks.null_group import is_collective, null_world
from benchmarks.variants import PARAMETERS, TinyModel, Trainee, Variant


@dataclass(frozen=True)
class Counts:
    """Numbers of one step; over plain, except for plain itself."""

    calls_forward_backward: float
    calls_step: float
    ops_forward_backward: float
    ops_step: float
    collectives_step: float

    def over(self, plain: Counts) -> Counts:
        """What goes beyond the plain model's."""
        pairs = zip(vars(self).values(), vars(plain).values(), strict=True)
        return Counts(*(number - base for number, base in pairs))

    def per(self, units: int) -> Counts:
        """Each number divided by ``units``."""
        return Counts(*(number / units for number in vars(self).values()))


def counts(
    variants: Sequence[Variant],
    *,
    units: int,
    parameters: int = PARAMETERS,
    world_size: int,
) -> dict[str, Counts]:
    """Count one steady step of each variant, the first of which is plain."""
    with null_world(world_size):
        # The first sharded model of a process wraps functions of torch, which the plain
        # model then calls, too.
        for variant in variants:
            _warm_up(variant, parameters)
        found = {v.name: _count(warm_trainee(v, units, parameters)) for v in variants}
    plain = found[variants[0].name]
    return {n: c if c is plain else c.over(plain) for n, c in found.items()}


@dataclass(frozen=True)
class SetUpCounts:
    """Calls of sharding, and of the first step beyond those of a later step."""

    shard: float
    first_forward_backward: float

    def over(self, fewer: SetUpCounts, units: int) -> SetUpCounts:
        """What each of ``units`` more units adds."""
        return SetUpCounts(
            (self.shard - fewer.shard) / units,
            (self.first_forward_backward - fewer.first_forward_backward) / units,
        )


def set_up_counts(variant: Variant, *, units: int, world_size: int) -> SetUpCounts:
    """Count the calls of sharding and of the first forward and backward."""
    with null_world(world_size):
        # What is made once per process or per kind of unit is made here.
        _warm_up(variant, PARAMETERS)
        model = TinyModel(units)
        sharded: list[torch.nn.Module] = []
        shard, _ = _calls_in(lambda: sharded.append(variant.shard(model)))
        trainee = Trainee(variant, sharded[0])
        first, _ = _calls_in(trainee.forward_backward)
        # The second forward still searches; its gradients are summed up.
        trainee.step()
        trainee.step()
        later, _ = _calls_in(trainee.forward_backward)
    return SetUpCounts(shard, first - later)


def _warm_up(variant: Variant, parameters: int) -> None:
    """Take the steps of a small model; the second ends the audit of the first."""
    trainee = Trainee.of(variant, 2, parameters)
    trainee.step()
    trainee.step()


def _count(trainee: Trainee) -> Counts:
    halves = (trainee.forward_backward, trainee.clip_and_update)
    (calls, sent), (more_calls, more_sent) = (_calls_in(half) for half in halves)
    ops, more_ops = (_ops_in(half) for half in halves)
    return Counts(calls, calls + more_calls, ops, ops + more_ops, sent + more_sent)


def _calls_in(function: Callable[[], None]) -> tuple[int, int]:
    """Calls that Python can see, of Python and of C functions; and collectives."""
    calls = collectives = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, collectives
        if event in ("call", "c_call"):
            calls += 1
        if event == "call" and is_collective(frame):
            collectives += 1

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls, collectives


def _ops_in(function: Callable[[], None]) -> int:
    counter = _OpCounter()
    with counter:
        function()
    return counter.seen


class _OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # ditto
    """Counts operators on plain tensors; a DTensor's count where it unpacks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen: int = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        self.seen += 1
        return func(*args, **(kwargs or {}))
