"""Run many random programs outside pytest, and list each distinct failure once.

::

    python -m property_tests.long_programs --programs 2000 --seed 1 --worlds 2,3
    python -m property_tests.long_programs --worlds 2 --repeat "Program(...)"

A failure does not end the run. Equal arguments draw equal programs, so a failure is
named by seed and index; its program can be pasted after ``--repeat`` and into
``program_examples``. The exit code is 1 if a program failed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisWarning

from property_tests.program_recipes import Options, Part, Program
from property_tests.program_strategies import programs
from property_tests.programs import FAILED, run_programs
from tests.support.world import RankFailure, rank_pool, shutdown_pools

TIMEOUT = 25.0
"""Seconds for one program."""


def run_one(program: Program, world_size: int) -> tuple[str, str]:
    """Run a program on ``world_size`` ranks.

    Returns: how its last action ended, and what failed on which rank, or "".
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            verdicts = rank_pool(world_size).run(
                run_programs, [program], folder, timeout=TIMEOUT
            )
        except RankFailure as error:
            told = sorted(Path(folder).glob(f"{FAILED}*"))
            ended = [f"{path.name}: {path.read_text()}" for path in told]
            ended += [f"rank {r}: {text.strip()}" for r, text in error.errors.items()]
            return "a rank ended", "\n".join(ended)
    ends = [found[0] for found in verdicts]
    failures = [f"rank {r}: {e.failure}" for r, e in enumerate(ends) if e.failure]
    if not failures and any(end.outcomes != ends[0].outcomes for end in ends):
        failures = [f"rank {r} ended {e.outcomes[-1]}" for r, e in enumerate(ends)]
    last = ends[0].outcomes[-1] if ends[0].outcomes else "nothing"
    # An outcome with an error reads "action: Error", the others are an action's name.
    known = {"": "equal to the plain model", "NoneType": "numbers too large to compare"}
    name = last.partition(": ")[2]
    return known.get(name, f"refused, or raised alike: {name}"), "\n".join(failures)


def kind_of(failure: str) -> str:
    """The failure without numbers and names, which differ from program to program."""
    first = failure.partition("\n")[0]
    died = re.search(r"died of \w+|no answer after", first)
    if died is not None:
        # Where the Python stack of a rank that died or waits enters the package.
        lines = re.findall(r"composable_fsdp/(\S+)\", line \d+,? in (\w+)", failure)
        return " ".join([died[0], *(f"{file}:{name}" for file, name in lines[:1])])
    text = first.partition(": ")[2]
    if text.startswith("Traceback"):
        text = failure.strip().rpartition("\n")[2]
    text = re.sub(r"[-\[]*\d[\d.e+, \[\]-]*(nan|inf)?", "#", text)
    return re.sub(r"'[^']*'", "'_'", text)[:120]


def draw(count: int, number: int, visit: Callable[[int, Program], None]) -> None:
    """Call ``visit`` with the index and value of each program drawn."""
    index = -1

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def drawn(program: Program) -> None:
        nonlocal index
        index += 1
        visit(index, program)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)
        drawn()


class Report:
    """Programs run so far, and how they ended."""

    def __init__(self, number: int) -> None:
        self.seed = number
        self.ends: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.began = time.monotonic()

    def run(self, index: int, program: Program, world_size: int) -> None:
        """Run a program; print its failure unless one of the kind was printed."""
        how, failure = run_one(program, world_size)
        kind = kind_of(failure) if failure else ""
        self.ends["failed" if failure else how] += 1
        self.failures[kind] += bool(failure)
        if not failure or self.failures[kind] > 1:
            return
        _say(f"FAILURE seed {self.seed} index {index} world {world_size}: {kind}")
        _say(f"  {program!r}")
        _say(*(f"  {line[:500]}" for line in failure.splitlines()[:12]))

    def tell(self) -> None:
        """Print counts."""
        seconds = time.monotonic() - self.began
        _say(f"seed {self.seed}: {self.ends.total()} programs in {seconds:.0f} s")
        _say(*(f"{count:7} {how}" for how, count in self.ends.most_common()))
        if self.ends["failed"]:
            _say("failures by kind:")
            found = self.failures.most_common()
            _say(*(f"{count:7} {kind}" for kind, count in found if kind))


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m property_tests.long_programs",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--programs", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument(
        "--worlds", default="2,1,3,4", help="ranks, in turn; default: 2,1,3,4"
    )
    parser.add_argument("--repeat", help="run this one program instead")
    asked = parser.parse_args(arguments)
    worlds = [int(count) for count in asked.worlds.split(",")]
    number = random.randrange(10**6) if asked.seed is None else asked.seed
    report = Report(number)
    try:
        if asked.repeat:
            names = {"Program": Program, "Part": Part, "Options": Options}
            program = eval(asked.repeat, names | {"inf": float("inf")})
            for index, world_size in enumerate(worlds):
                report.run(index, program, world_size)
        else:
            draw(
                asked.programs,
                number,
                lambda index, program: report.run(
                    index, program, worlds[index % len(worlds)]
                ),
            )
    finally:
        report.tell()
        shutdown_pools()
    return 1 if report.ends["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
