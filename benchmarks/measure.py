"""CPU time of a step's halves, all variants in turn in one process.

All variants are stepped in turn, many rounds, and compared with the plain model
**within a round**, so that a machine that slows down slows all of them:

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import torch

from benchmarks.null_group import null_world
from benchmarks.variants import PARAMETERS, PLAIN, Trainee, Variant

STEPS_PER_TURN = 3
# The next power of two, where gradients are looked at again, is 16.
WARM_UP_STEPS = 9

Result = TypeVar("Result")
Key = TypeVar("Key")


class Halves(NamedTuple):
    """CPU seconds of the two halves of a step."""

    forward_backward: float
    clip_update: float


@dataclass(frozen=True)
class StepTime:
    """CPU microseconds per unit and step; over plain, except for plain itself."""

    forward_backward: float
    clip_update: float
    step: float
    step_spread: float  # half the distance between the quartiles of ``step``


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
    """Time whole steps of all ``variants``, the first of which is plain."""
    with null_world(world_size):
        trainees = {variant.name: warm_trainee(variant, units) for variant in variants}
        samples = take_turns(trainees, rounds)
    plain = samples[variants[0].name]
    nothing = [Halves(0.0, 0.0)] * rounds
    return {
        name: _over(turns, nothing if turns is plain else plain, units)
        for name, turns in samples.items()
    }


def overheads(
    variants: Sequence[Variant],
    *,
    units: int,
    parameters: Sequence[int],
    world_size: int,
    rounds: int,
) -> dict[tuple[str, int], list[float]]:
    """Microseconds of forward and backward over plain per unit, one for each round.

    For each variant and number of parameters a unit, all in turn. Plain's own are its
    absolute ones.
    """
    with null_world(world_size):
        trainees = _warm(variants, units, parameters, update=False)
        samples = take_turns(trainees, rounds, update=False)

    def over(name: str, number: int) -> list[float]:
        pairs = zip(samples[name, number], samples[PLAIN.name, number], strict=True)
        base = 0 if name == PLAIN.name else 1
        return [1e6 / units * (turn[0] - base * plain[0]) for turn, plain in pairs]

    return {key: over(*key) for key in samples}


def updates(
    variants: Sequence[Variant],
    *,
    units: int,
    parameters: Sequence[int],
    world_size: int,
    rounds: int,
) -> dict[tuple[str, int], list[float]]:
    """Microseconds of clip and optimizer step per unit, one for each round.

    For each variant and number of parameters a unit, all in turn; absolute ones.
    """
    with null_world(world_size):
        trainees = _warm(variants, units, parameters, update=True)
        samples = take_turns(trainees, rounds)
    return {
        key: [1e6 / units * turn.clip_update for turn in turns]
        for key, turns in samples.items()
    }


def _warm(
    variants: Sequence[Variant], units: int, parameters: Sequence[int], *, update: bool
) -> dict[tuple[str, int], Trainee]:
    return {
        (variant.name, number): warm_trainee(variant, units, number, update=update)
        for number in parameters
        for variant in variants
    }


def warm_trainee(
    variant: Variant, units: int, parameters: int = PARAMETERS, *, update: bool = True
) -> Trainee:
    """A trainee in its steady state, on one thread; needs a ``null_world``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainee = Trainee.of(variant, units, parameters)
    # Also without ``update``: our audit of the first step watches until there is one.
    trainee.forward_backward()
    trainee.clip_and_update()
    for _ in range(WARM_UP_STEPS):
        trainee.forward_backward()
        (trainee.clip_and_update if update else trainee.drop_gradients)()
    return trainee


def take_turns(
    trainees: Mapping[Key, Trainee], rounds: int, *, update: bool = True
) -> dict[Key, list[Halves]]:
    """The halves of a step of each trainee, in each of the rounds.

    Without ``update`` the second half only drops the gradients.
    """
    samples: dict[Key, list[Halves]] = {key: [] for key in trainees}
    order = list(trainees)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for key in order:
            samples[key].append(_take_turn(trainees[key], update))
        order.append(order.pop(0))
    return samples


def _take_turn(trainee: Trainee, update: bool) -> Halves:
    """Each half the least of the turn's steps."""
    second = trainee.clip_and_update if update else trainee.drop_gradients
    gc.collect()
    gc.disable()
    try:
        halves = [
            (cpu_seconds(trainee.forward_backward), cpu_seconds(second))
            for _ in range(STEPS_PER_TURN)
        ]
    finally:
        gc.enable()
    return Halves(*map(min, zip(*halves, strict=True)))


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of this process, all its threads, in ``function``."""
    start = time.process_time()
    function()
    return time.process_time() - start


def _over(turns: Sequence[Halves], base: Sequence[Halves], units: int) -> StepTime:
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
