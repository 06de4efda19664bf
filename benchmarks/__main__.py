"""All benchmarks in order: ``python -m benchmarks``, or ``--full`` for every cell.

Each is a command of its own, run in a fresh process, and printed before it runs. To
add one, add a line to ``SUITE``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.tables import say


class Cell(NamedTuple):
    """A module of this folder and its arguments, for one cell and for every cell."""

    module: str
    quick: str
    full: str


SUITE = (
    Cell(
        "host_overhead",
        "--rounds 15",
        "--units 16 64 256 --world 8 128 1024 --rounds 15",
    ),
    Cell(
        "setup",
        "--units 100 1000 --only fsdp2 floor ours",
        "--units 100 1000 5000",
    ),
    Cell("fingerprint", "", "--repeats 9"),
    Cell("step", "--rounds 12", "--rounds 40"),
    Cell("tensor_parallel", "--rounds 5", "--rounds 21"),
    Cell("overlap", "--rounds 3", ""),
    Cell("cuda", "", ""),
    Cell("checkpoint", "", "--many 500 1000"),
    Cell("async_save", "", "--rounds 15"),
    Cell("save_plan", "--layers 32 --width 4096 --feed 11008 --ranks 128", ""),
    Cell("memory", "", "--worlds 8 64 1024"),
    Cell("traffic", "", ""),
    Cell("scale", "--layers 32", ""),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; the number of benchmarks that failed."""
    options = _parse(arguments)
    failed = []
    start = time.monotonic()
    for module, quick, full in SUITE:
        if module not in options.only:
            continue
        command = f"-m benchmarks.{module} {full if options.full else quick}".split()
        say(f"\n# python {' '.join(command)}")
        began = time.monotonic()
        # One thread, whatever the environment says: a second would blur CPU time.
        threads = {**os.environ, "OMP_NUM_THREADS": "1"}
        if subprocess.run([sys.executable, *command], env=threads).returncode:
            failed.append(module)
        say(f"# {time.monotonic() - began:.0f} s")
    say(f"\n# all: {time.monotonic() - start:.0f} s; failed: {failed or 'none'}")
    return len(failed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [cell.module for cell in SUITE]
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("--full", action="store_true", help="every cell")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
