"""Scripts under the environment of torchrun, in processes that have torch imported.

The fork server of the rank pools starts the processes. A fresh interpreter would import
torch first, which takes longer than most scripts do.
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

Run = Callable[..., tuple[int, str, str]]
"""A command line as a function: exit status, standard output and standard error."""


class Ended(NamedTuple):
    """How a rank ended."""

    status: int | None
    """0, the exit status, or the negative number of the signal that killed the rank."""
    output: str
    seconds: float
    """Time between the end of the first rank and that of this rank."""


def run_script(
    script: str, *arguments: str, ranks: int, folder: Path
) -> tuple[int, str]:
    """Run ``script``; the first bad exit status or 0, and the output of all ranks."""
    ended = launch(script, *arguments, ranks=ranks, folder=folder, output="output")
    bad = [each.status for each in ended if each.status]
    return bad[0] if bad else 0, (folder / "output").read_text()


def launch(
    script: str,
    *arguments: str,
    ranks: int,
    folder: Path,
    output: str = "output_{rank}",
    limit: float = 100.0,
    before: Callable[[], None] | None = None,
    meanwhile: Callable[[list[BaseProcess]], None] | None = None,
    store: Any = None,
) -> list[Ended]:
    """Run ``script`` on ranks of its own in ``folder``; return per rank how it ended.

    ``script`` is the path of a file or the name of a module. ``output`` names the files
    of what ranks print, ``limit`` the seconds after which they are killed. ``before``
    is called in each process before the script, ``meanwhile`` with the processes once
    they run. ``store`` has what earlier ranks have left.
    """
    # The launcher hosts the store, as torchrun does: no rank's death takes it away.
    store = store or seam.tcp_store()
    for key in store.list_keys():
        # Addresses of ranks that are gone, which torch's init would call.
        if key.startswith("default_pg/0//"):
            store.delete_key(key)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # The script's process group joins the store above, and hosts none.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    files = [folder / output.format(rank=rank) for rank in range(ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    processes: list[BaseProcess] = []
    for rank, file in enumerate(files):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context_of("gloo").Process(  # type: ignore[attr-defined]  # typeshed: only on subclasses
            target=_run, args=(script, arguments, own, file, before)
        )
        process.start()
        processes.append(process)
    try:
        if meanwhile is not None:
            meanwhile(processes)
        ends = _ends(processes, limit)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        Ended(process.exitcode, file.read_text(), end - min(ends))
        for process, file, end in zip(processes, files, ends, strict=True)
    ]


def _ends(processes: list[BaseProcess], limit: float) -> list[float]:
    """Wait for the ends of ``processes``; the time of each."""
    last = time.monotonic() + limit
    ends = [0.0] * len(processes)
    while not all(ends) and time.monotonic() < last:
        for index, process in enumerate(processes):
            if not ends[index] and not process.is_alive():
                ends[index] = time.monotonic()
        time.sleep(0.02)
    return [end or last for end in ends]


def _run(
    script: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    file: Path,
    before: Callable[[], None] | None,
) -> None:
    """Be an interpreter that runs ``script``."""
    os.chdir(file.parent)
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    status: object = None
    try:
        if before is not None:
            before()
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
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
    os._exit(status if isinstance(status, int) else int(status is not None))
