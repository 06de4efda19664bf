"""What can be measured of a variant: CPU time of a step, exact counts, set-up time.

All variants are stepped in turn in one process, many rounds, and compared with the
plain model **within a round**, so that a machine that slows down slows all of them:

    round 0   plain x k | fsdp1 x k | fsdp2 x k | ours x k
    round 1   fsdp1 x k | fsdp2 x k | ours x k  | plain x k       (the order turns)
    result    median over rounds of (variant - plain) / units

Times are CPU time of the process, garbage collection is off inside a turn, and torch
runs on one thread (a CPU-only backward stays on the calling one).
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.null_group import is_collective, null_world
from benchmarks.variants import TinyModel, Trainee, Variant

STEPS_PER_TURN = 3
WARM_UP_STEPS = 4
STEADY_STEPS = 5

Result = TypeVar("Result")


@dataclass(frozen=True)
class StepTime:
    """CPU microseconds per unit and step; over plain, except for plain itself."""

    forward_backward: float
    clip_update: float
    step: float
    step_spread: float  # half the distance between the quartiles of ``step``


@dataclass(frozen=True)
class Counts:
    """Exact numbers per unit and step; over plain, except for plain itself."""

    calls_forward_backward: float
    calls_step: float
    ops_forward_backward: float
    ops_step: float
    collectives_step: float


@dataclass(frozen=True)
class SetUp:
    """CPU seconds: sharding a built model, its first step, and a later step.

    A step is forward and backward, unless the update was asked for.
    """

    shard: float
    first_step: float
    steady_step: float


def in_child(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a fork of this process and return what it returned.

    The parent never runs a backward: autograd refuses to work in a fork made after one.

    Raises: RuntimeError, if the child ended without a result (it printed why).
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work(connection: Connection) -> None:
        connection.send(function())

    child = context.Process(target=work, args=(sender,))
    child.start()
    sender.close()
    try:
        result: Result = receiver.recv()
    except EOFError:
        raise RuntimeError("A measurement failed; its traceback is above.") from None
    finally:
        child.join()
    return result


def step_times(
    variants: Sequence[Variant], *, units: int, world_size: int, rounds: int
) -> dict[str, StepTime]:
    """Time the steps of all ``variants``, the first of which is plain."""
    with null_world(world_size):
        trainees = {variant.name: warm_trainee(variant, units) for variant in variants}
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in trainees}
        order = list(trainees)
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for name in order:
                samples[name].append(_take_turn(trainees[name]))
            order.append(order.pop(0))
    plain = samples[variants[0].name]
    nothing = [(0.0, 0.0)] * rounds
    return {
        name: _over(turns, nothing if turns is plain else plain, units)
        for name, turns in samples.items()
    }


def counts(
    variants: Sequence[Variant], *, units: int, world_size: int
) -> dict[str, Counts]:
    """Count Python-visible calls and dispatched operators in one steady step."""
    with null_world(world_size):
        found = {v.name: _count(warm_trainee(v, units), units) for v in variants}
    plain = found[variants[0].name]
    for name, numbers in found.items():
        if numbers is not plain:
            pairs = zip(vars(numbers).values(), vars(plain).values(), strict=True)
            found[name] = Counts(*(number - base for number, base in pairs))
    return found


def set_up(
    variant: Variant, *, units: int, world_size: int, with_update: bool
) -> SetUp:
    """Time sharding and the first steps; call it in a fresh child for each variant.

    A model of two units goes first, to pay the imports made on first use. Clip and
    optimizer are left out unless ``with_update``: the first AdamW(foreach=True) over
    FSDP2's DTensors takes time that grows with the square of their number (torch 2.13),
    minutes at 1,000 units, and says nothing about sharding.
    """
    with null_world(world_size):
        warm_trainee(variant, units=2)
        model = TinyModel(units)
        gc.collect()
        gc.freeze()

        start = time.process_time()
        sharded = variant.shard(model)
        shard = time.process_time() - start

        trainee = Trainee(variant, sharded)
        step = trainee.step if with_update else trainee.forward_backward
        first_step = _cpu_seconds(step)
        steady = []
        for _ in range(STEADY_STEPS):
            trainee.drop_gradients()
            steady.append(_cpu_seconds(step))
    return SetUp(shard, first_step, statistics.median(steady))


def median_set_up(repeats: Iterable[SetUp]) -> SetUp:
    """Field-wise median over repeated measurements."""
    columns = zip(*(vars(repeat).values() for repeat in repeats), strict=True)
    return SetUp(*(statistics.median(column) for column in columns))


def warm_trainee(variant: Variant, units: int) -> Trainee:
    """A trainee in its steady state, on one thread; needs a ``null_world``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainee = Trainee.of(variant, units)
    for _ in range(WARM_UP_STEPS):
        trainee.step()
    return trainee


def _take_turn(trainee: Trainee) -> tuple[float, float]:
    """CPU seconds of the two halves of a step, each the least of the turn's steps."""
    gc.collect()
    gc.disable()
    try:
        halves = [
            (
                _cpu_seconds(trainee.forward_backward),
                _cpu_seconds(trainee.clip_and_update),
            )
            for _ in range(STEPS_PER_TURN)
        ]
    finally:
        gc.enable()
    return min(first for first, _ in halves), min(second for _, second in halves)


def _cpu_seconds(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _over(
    turns: Sequence[tuple[float, float]],
    base: Sequence[tuple[float, float]],
    units: int,
) -> StepTime:
    scale = 1e6 / units
    pairs = list(zip(turns, base, strict=True))
    first = [(turn[0] - other[0]) * scale for turn, other in pairs]
    second = [(turn[1] - other[1]) * scale for turn, other in pairs]
    whole = [sum(halves) for halves in zip(first, second, strict=True)]
    quartiles = statistics.quantiles(whole, n=4) if len(whole) > 1 else [0.0] * 3
    return StepTime(
        statistics.median(first),
        statistics.median(second),
        statistics.median(whole),
        (quartiles[2] - quartiles[0]) / 2,
    )


def _count(trainee: Trainee, units: int) -> Counts:
    halves = (trainee.forward_backward, trainee.clip_and_update)
    (calls, sent), (more_calls, more_sent) = (_calls_in(half) for half in halves)
    ops, more_ops = (_ops_in(half) for half in halves)
    totals = (calls, calls + more_calls, ops, ops + more_ops, sent + more_sent)
    return Counts(*(total / units for total in totals))


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
