"""The parent of the ranks: a pool is started once and runs one function after another.

Ranks on gloo come from multiprocessing's fork server, which has imported torch; those
on NCCL are spawned. A run that fails on any rank ends the pool.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import unittest
import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.support.collect import (
    Rank,
    RankFailure,
    collect,
    tail,
    unfinished,
)
from tests.support.place import Job, Place
from tests.support.rank import serve

T = TypeVar("T")

BACKEND_VARIABLE = "COMPOSABLE_FSDP_TEST_BACKEND"
START_TIMEOUT = 60.0
# Slow imports, paid once in the fork server and not by each of ten ranks.
_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pytest",
    "hypothesis",
    "composable_fsdp.api",
    "tests.support.rank",
    "tests.support.reference",
    "tests.support.sharded",
    # Where they are installed: see tests/integrations_env.
    "lightning.pytorch",
]


class RankPool:
    """``world_size`` processes in one process group, kept from run to run."""

    def __init__(self, world_size: int, backend: str) -> None:
        self.world_size = world_size
        self.backend = backend
        self._ranks: list[Rank] = []
        self._folder: Path | None = None
        self._calls: int | None = None

    def run(
        self,
        function: Callable[..., T],
        *args: object,
        timeout: float = 60.0,
        patience: float | None = None,
        retire: bool = False,
    ) -> list[T]:
        """Call ``function(world, *args)`` on every rank; its results in rank order.

        All must pickle, and every rank must make as many calls on the default group.
        ``patience``: seconds for the others once one has failed (1) or returned (5).
        ``retire`` ends the pool afterwards and lets calls be left unfinished.

        Raises: RankFailure, if a rank raised, died or was silent; TypeError, if
        something does not pickle.
        """
        job = _job(function, args)
        what = _name(function)
        # An idle rank has nothing to say: a wire with news is that of a dead one. Its
        # end of the wire may close a moment after the process is gone.
        if any(r.wire.poll() or not r.process.is_alive() for r in self._ranks):
            self.close()
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                _send(rank, job)
            results = self._results(what, timeout, patience, check=not retire)
        except BaseException:
            self.close()
            raise
        if retire or self._calls is None:
            self.close()
        return results

    def close(self) -> None:
        """Kill every rank and remove what they left; the next run starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join(5)
            rank.wire.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks, self._folder, self._calls = [], None, None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = context_of(self.backend)
        for rank in range(self.world_size):
            place = Place(rank, self.world_size, self.backend, self._folder)
            here, there = context.Pipe()
            # Not daemonic: a rank may start data loader workers of its own.
            process = context.Process(  # type: ignore[attr-defined]  # typeshed: only on subclasses
                target=serve, args=(place, there), name=f"rank{rank}"
            )
            process.start()
            there.close()
            self._ranks.append(Rank(place, process, here))
        self._results("the start", START_TIMEOUT, START_TIMEOUT, check=True)

    def _results(
        self, what: str, timeout: float, patience: float | None, *, check: bool
    ) -> list[Any]:
        answers, errors, late = collect(self._ranks, timeout, patience)
        raised = {r: a.error for r, a in answers.items() if a.error is not None}
        returned = {
            r: pickle.loads(a.result) if a.result else None
            for r, a in answers.items()
            if a.error is None
        }
        errors = {**errors, **raised, **late}
        if not errors and check:
            errors = unfinished(answers, self._calls)
        if errors:
            outputs = {r.place.rank: tail(r.place.output) for r in self._ranks}
            raise RankFailure(what, errors, outputs)
        self._calls = answers[0].calls
        return [returned[rank] for rank in range(self.world_size)]


_pools: dict[tuple[str, int], RankPool] = {}


def backend() -> str:
    """The backend that tests use: ``COMPOSABLE_FSDP_TEST_BACKEND``, or ``gloo``."""
    name = os.environ.get(BACKEND_VARIABLE) or "gloo"
    if name not in ("gloo", "nccl"):
        raise ValueError(f"{BACKEND_VARIABLE} must be 'gloo' or 'nccl', not {name!r}.")
    return name


def rank_pool(world_size: int) -> RankPool:
    """The pool of ``world_size`` ranks that this process keeps; it starts on first use.

    Raises: unittest.SkipTest, under NCCL with fewer GPUs than ranks.
    """
    name = backend()
    if name == "nccl" and (gpus := torch.cuda.device_count()) < world_size:
        raise unittest.SkipTest(
            f"{world_size} ranks on NCCL need {world_size} GPUs; {gpus} found"
        )
    return _pools.setdefault((name, world_size), RankPool(world_size, name))


def shutdown_pools() -> None:
    """End every pool that `rank_pool` keeps; a later run starts them again."""
    for pool in _pools.values():
        pool.close()


# Before multiprocessing's own exit handler, which would wait for the ranks.
atexit.register(shutdown_pools)


def context_of(backend: str) -> BaseContext:
    """How processes of this backend are started."""
    if backend == "nccl":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _name(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _job(function: Callable[..., object], args: tuple[object, ...]) -> Job:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        shipped = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{_name(function)} cannot be sent to the ranks ({error}); pass a function "
            "at module level, not a lambda or a function inside another."
        ) from error
    try:
        arguments = pickle.dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"an argument of {_name(function)} cannot be sent to the ranks ({error}); "
            "pass a recipe and build from it on the rank."
        ) from error
    module = str(inner.__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    filters = pickle.dumps(list(warnings.filters))
    return Job(module, file, shipped, arguments, list(sys.path), filters)


def _send(rank: Rank, job: Job) -> None:
    try:
        rank.wire.send(job)
    except OSError:
        # The rank has died; collecting its answer says so, and how.
        return
