"""Ranks of their own for faults that end a process, started in a fraction of a second.

::

    ended = launch("kill-in-forward", ranks=2, folder=tmp_path)
    ended[0].status, ended[0].output, ended[0].seconds
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support import seam
from tests.support.pool import context_of

PROGRAM = Path(__file__).with_name("faulty_training.py")
LIMIT = 25.0
"""Seconds after which ranks that run on are killed."""


class Ended(NamedTuple):
    """How a rank ended."""

    status: int | None
    """0, the exit status, or the negative number of the signal that killed the rank."""
    output: str
    seconds: float
    """Time between the end of the first rank and that of this rank."""


def launch(
    *arguments: str,
    ranks: int,
    folder: Path,
    program: Path = PROGRAM,
    before: Callable[[], None] | None = None,
    meanwhile: Callable[[list[BaseProcess]], None] | None = None,
    store: Any = None,
) -> list[Ended]:
    """Run ``program`` on ranks of their own; return per rank how it ended.

    ``before`` is called in each process before the script, ``meanwhile`` with the
    processes once they run. ``store`` has what earlier ranks have left.
    """
    # The launcher hosts the store, as torchrun does: no rank's death takes it away.
    store = store or seam.tcp_store()
    forget_addresses(store)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context_of("gloo").Process(  # type: ignore[attr-defined]  # typeshed: only on subclasses
            target=_run, args=(str(program), arguments, own, str(folder), before)
        )
        process.start()
        processes.append(process)
    try:
        if meanwhile is not None:
            meanwhile(processes)
        ends = _ends(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        Ended(
            process.exitcode,
            (folder / f"output_{rank}").read_text(),
            ends[rank] - min(ends),
        )
        for rank, process in enumerate(processes)
    ]


def forget_addresses(store: Any) -> None:
    """Remove the addresses of ranks that are gone, which torch's init would call."""
    for key in store.list_keys():
        if key.startswith("default_pg/0//"):
            store.delete_key(key)


def _ends(processes: list[BaseProcess]) -> list[float]:
    """Wait for the ends of ``processes``; the time of each."""
    limit = time.monotonic() + LIMIT
    ends = [0.0] * len(processes)
    while not all(ends) and time.monotonic() < limit:
        for index, process in enumerate(processes):
            if not ends[index] and not process.is_alive():
                ends[index] = time.monotonic()
        time.sleep(0.02)
    return [end or limit for end in ends]


def _run(
    program: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: str,
    before: Callable[[], None] | None,
) -> None:
    """Be an interpreter that runs ``program``."""
    os.chdir(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    output = os.open(f"output_{environment['RANK']}", flags)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    status: object = 0
    try:
        if before is not None:
            before()
        runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        # As the interpreter does before it calls the functions of ``atexit``.
        sys.last_value = error
        traceback.print_exc()
        status = 1
    # A process of multiprocessing ends without these.
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
