"""Run every example on 2 ranks, then a short form of it on 1 and on 3: `make examples`.

    python examples/run_all.py                 # all, in a temporary folder
    python examples/run_all.py train_lm.py     # some

Each example has comments that say how to run it:

    # example: --steps 60    arguments, for a run on 2 ranks
    # quick: --steps 3       arguments, for runs on 1 rank and on 3 ranks, and for tests
    # needs: transformers    packages; without them the example is left out, aloud
    # launch: python         without torchrun: the program starts ranks itself

The short forms run in processes that have torch imported (`tests/support/scripts.py`),
as the launch is the same for all. A run that takes longer than a minute is
marked `slow`. The exit status is 1 if a run
fails, or has not ended after ten minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from tests.support.scripts import run_script  # noqa: E402  # from the checkout

GOAL = 60.0
"""Seconds that a run should take on two quiet cores; a shared machine is slower."""
DEVELOPMENT = {"transformers"}
"""Packages that the development environment has."""
LIMIT = 600.0
"""Seconds after which a run is taken for stuck and ended."""


@dataclass(frozen=True)
class Example:
    """A program and how to run it."""

    path: Path
    arguments: list[str]
    quick: list[str]
    needs: list[str]
    launch: str

    @classmethod
    def read(cls, path: Path) -> Example | None:
        """Return the example in ``path``; None, if no comment says how to run it."""
        pattern = r"^# (example|quick|needs|launch):[ ]*(.*)$"
        said = dict(re.findall(pattern, path.read_text(), re.MULTILINE))
        if "example" not in said:
            return None
        words = {key: text.replace(",", " ").split() for key, text in said.items()}
        quick, needs = words.get("quick", []), words.get("needs", [])
        launch = said.get("launch", "torchrun")
        return cls(path, words["example"], quick, needs, launch)

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def command(self, arguments: list[str], ranks: int) -> list[str]:
        """Return the command line of a run on ``ranks`` ranks."""
        program = [str(self.path), *arguments]
        if self.launch == "python":
            return [sys.executable, *program]
        agent = ["-m", "torch.distributed.run", "--standalone"]
        return [sys.executable, *agent, "--nproc-per-node", str(ranks), *program]

    def runs(self) -> list[tuple[list[str], int]]:
        """Return arguments and ranks of the runs, in order, all in one folder."""
        # The later runs find the files of those before them.
        if self.launch == "python":
            return [(self.arguments, 2), (self.arguments, 2)]
        return [(self.arguments, 2), (self.quick, 1), (self.quick, 3)]


def examples() -> list[Example]:
    """Return the programs of this folder that are examples."""
    found = [Example.read(path) for path in sorted(FOLDER.glob("*.py"))]
    return [
        each for each in found if each is not None and each.path.name != "run_all.py"
    ]


def run(example: Example, folder: str) -> bool:
    """Run ``example`` in ``folder``; return whether all runs were good."""
    for arguments, ranks in example.runs():
        started = time.perf_counter()
        if ranks == 2:
            status, output = launch(example.command(arguments, ranks), folder)
        else:
            (Path(folder) / "output").unlink(missing_ok=True)
            program = str(example.path), *arguments
            status, output = run_script(*program, ranks=ranks, folder=Path(folder))
        seconds = time.perf_counter() - started
        mark = "FAILED" if status else "slow  " if seconds > GOAL else "ok    "
        text = " ".join([example.path.name, *arguments])
        print(f"{mark} {seconds:5.1f} s  {ranks} ranks  {text}", flush=True)
        if status:
            print(output, flush=True)
            return False
    return True


def launch(command: list[str], folder: str) -> tuple[int, str]:
    """Run ``command`` in ``folder``; return its exit status and what it printed."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        # The ranks of a stuck launch are in its session and would outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 1, f"{output}\nended after {LIMIT:.0f} s: the run did not end by itself"
    return process.returncode, output


def main() -> int:
    """Run the examples; return the exit status."""
    parser = argparse.ArgumentParser(description="Run the examples.")
    parser.add_argument("names", nargs="*", help="files (all)")
    parser.add_argument(
        "--needing-packages",
        action="store_true",
        help="no others than these",
    )
    arguments = parser.parse_args()
    failed = False
    for example in examples():
        if arguments.names and example.path.name not in arguments.names:
            continue
        if arguments.needing_packages and {*example.needs} <= DEVELOPMENT:
            continue
        if example.missing:
            missing = ", ".join(example.missing)
            print(f"LEFT OUT {example.path.name}: {missing} not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            failed |= not run(example, folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
