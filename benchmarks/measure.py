"""What can be measured of a variant: CPU time of a step, set-up time.

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
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from benchmarks.null_group import null_world
from benchmarks.variants import PARAMETERS, TinyModel, Trainee, Variant

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


def warm_trainee(variant: Variant, units: int, parameters: int = PARAMETERS) -> Trainee:
    """A trainee in its steady state, on one thread; needs a ``null_world``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainee = Trainee.of(variant, units, parameters)
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
