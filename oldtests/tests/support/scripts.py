"""Scripts under the environment of torchrun, in processes that have torch imported.

The fork server of the rank pools starts the processes. A fresh interpreter would import
torch first, which takes longer than most scripts do.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.support import seam
from tests.support.pool import context_of

Run = Callable[..., tuple[int, str, str]]
"""A command line as a function: exit status, standard output and standard error."""


def run_script(
    script: str, *arguments: str, ranks: int, folder: Path
) -> tuple[int, str]:
    """Run ``script`` in ``folder``; the first bad exit status or 0, and the output.

    Args:
        script: The path of a file, or the name of a module.
        arguments: Its command line.
        ranks: The number of processes, which meet as those of torchrun do.
        folder: The working directory; the file ``output`` in it is written.
    """
    store = seam.tcp_store()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # The script's process group joins the store above, and hosts none.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    processes = []
    for rank in range(ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context_of("gloo").Process(  # type: ignore[attr-defined]  # typeshed: only on subclasses
            target=_run, args=(script, arguments, own, str(folder))
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(100)
        process.kill()
        process.join()
    bad = [process.exitcode for process in processes if process.exitcode]
    return bad[0] if bad else 0, (folder / "output").read_text()


def _run(
    script: str, arguments: Sequence[str], environment: dict[str, str], folder: str
) -> None:
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    if script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
