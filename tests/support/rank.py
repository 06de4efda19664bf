"""One rank of a pool: a process that joins a group once and then answers jobs.

It ends with its parent, keeps its output in a file, and on SIGUSR1 writes its stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import reprlib
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from tests.support import seam
from tests.support.place import (
    BODY,
    COLLECTIVE_TIMEOUT,
    Answer,
    Job,
    Place,
    World,
)

_RUNS_BETWEEN_COLLECTIONS = 25


def serve(place: Place, wire: Connection[Any, Any]) -> None:
    """Be rank ``place.rank`` until the parent closes ``wire``; never returns."""
    stacks = _prepare_process(place)
    try:
        world = _join(place)
    except Exception:
        wire.send(Answer(error=traceback.format_exc()))
        os._exit(1)
    wire.send(Answer(calls=seam.calls_issued()))
    runs = 0
    while (job := _next_job(wire)) is not None:
        runs += 1
        _reset(collect=runs % _RUNS_BETWEEN_COLLECTIONS == 0)
        wire.send(_answer(world, job))
    stacks.close()
    # A normal exit would wait for threads of groups whose peers are gone already.
    os._exit(0)


def _prepare_process(place: Place) -> IO[str]:
    output = os.open(place.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Ctrl-C goes to the whole terminal group; the parent decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stacks = place.stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # A crash writes them, too: without, it would leave no trace of where it was.
    faulthandler.enable(file=stacks, all_threads=False)
    torch.set_num_threads(1)
    # What the fork server imported lives as long as the rank: to look through it for
    # garbage would take ten times what most runs take.
    gc.freeze()
    return stacks


def _end_with_parent() -> None:
    # PR_SET_PDEATHSIG would watch the fork server, which lives as long as any rank.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _join(place: Place) -> World:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if place.backend == "nccl":
        device = torch.device("cuda", place.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        place.backend,
        store=seam.file_store(place.folder / "store", place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return World(
        place.rank, place.world_size, device, place.backend, seam.default_group()
    )


def _next_job(wire: Connection[Any, Any]) -> Job | None:
    try:
        job: Job = wire.recv()
    except (EOFError, OSError):
        return None
    return job


def _reset(*, collect: bool) -> None:
    os.ftruncate(1, 0)
    # Now, not after the last run: a peer may then still have been reading from us.
    seam.destroy_subgroups()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if collect:
        gc.collect()


def _answer(world: World, job: Job) -> Answer:
    try:
        sys.path[:] = job.sys_path
        _import(job.module, job.file)
        function: Callable[..., object] = pickle.loads(job.function)
        function = getattr(function, BODY, function)
        arguments: tuple[object, ...] = pickle.loads(job.arguments)
        with warnings.catch_warnings(), _restored(arguments):
            _use_filters(pickle.loads(job.warning_filters))
            result = function(world, *arguments)
        return Answer(result=pickle.dumps(result), calls=seam.calls_issued())
    # pytest's own outcomes (fail, skip) and SystemExit are not of class Exception.
    except BaseException as error:
        return Answer(error=_describe(error, job.file), calls=seam.calls_issued())


@contextlib.contextmanager
def _restored(arguments: tuple[object, ...]) -> Iterator[None]:
    """Give the next job the environment and the patched objects of before this one.

    A ``monkeypatch`` that a test sends to a rank is a copy, which pytest cannot undo.
    """
    environment = dict(os.environ)
    try:
        yield
    finally:
        for argument in arguments:
            if isinstance(argument, pytest.MonkeyPatch):
                argument.undo()
        # Most jobs change nothing, and each write is a call of putenv.
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)


def _import(name: str, file: str | None) -> None:
    """Make module ``name`` the one from ``file``, also where no path leads to it."""
    known = sys.modules.get(name)
    if known is None:
        try:
            known = importlib.import_module(name)
        except ModuleNotFoundError:
            if file is None:
                raise
    if file is None or (known is not None and known.__file__ == file):
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name!r} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _use_filters(filters: list[Any]) -> None:
    # The rules of the running test hold on its ranks; resetting also makes Python
    # forget which warnings it has shown already.
    warnings.resetwarnings()
    rules: Any = warnings.filters
    rules.extend(filters)


def _describe(error: BaseException, file: str | None) -> str:
    """The traceback, and the local values of the last frame in ``file``.

    Test modules are not rewritten by pytest on a rank, so a bare assert says nothing
    of the values it compared.
    """
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    own = [frame for frame in frames if frame.f_code.co_filename == file]
    if not own:
        return text
    short = reprlib.Repr()
    short.maxother = short.maxstring = short.maxlong = 300
    values = [f"    {k} = {short.repr(v)}\n" for k, v in own[-1].f_locals.items()]
    return f"{text}with, in {own[-1].f_code.co_name}:\n{''.join(values)}"
