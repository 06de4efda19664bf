"""Waiting for ranks: who answered, who died, who is silent, and where it stands."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.place import Answer, Place

# How long the other ranks get once one rank has failed, or has returned.
PATIENCE_AFTER_FAILURE = 1.0
PATIENCE_AFTER_RETURN = 5.0
_OUTPUT_SHOWN = 4000


class RankFailure(RuntimeError):
    """A run failed on at least one rank; the pool has ended."""

    def __init__(
        self, what: str, errors: dict[int, str], outputs: dict[int, str]
    ) -> None:
        sections = [f"{what} failed on {len(errors)} of {len(outputs)} ranks"]
        for rank, output in outputs.items():
            text = errors.get(rank, "succeeded")
            sections.append(f"--- rank {rank} ---\n{text.rstrip()}")
            if output:
                sections.append(f"--- output of rank {rank} ---\n{output.rstrip()}")
        super().__init__("\n".join(sections))


@dataclass(frozen=True)
class Rank:
    """The parent's hold on one rank."""

    place: Place
    process: BaseProcess
    wire: Connection[Any, Any]


def collect(
    ranks: list[Rank], timeout: float, patience: float | None
) -> tuple[dict[int, Answer], dict[int, str], dict[int, str]]:
    """Answers, deaths and silences, each by rank."""
    began = time.monotonic()
    deadline, reason = began + timeout, f"the time limit is {timeout:g} s"
    answers: dict[int, Answer] = {}
    deaths: dict[int, str] = {}
    waiting = {rank.place.rank: rank for rank in ranks}
    while waiting and _wait_for_any(list(waiting.values()), deadline):
        for number, rank in list(waiting.items()):
            answer = _receive(rank)
            if answer is None:
                continue
            del waiting[number]
            failed = isinstance(answer, str) or answer.error is not None
            if isinstance(answer, str):
                deaths[number] = answer
            else:
                answers[number] = answer
            grace = PATIENCE_AFTER_FAILURE if failed else PATIENCE_AFTER_RETURN
            grace = grace if patience is None else patience
            if time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                verb = "failed" if failed else "returned; a collective left unfinished?"
                reason = f"{grace:g} s after rank {number} {verb}"
    elapsed = time.monotonic() - began
    late = {
        number: f"no answer after {elapsed:.1f} s ({reason}); it was here:\n"
        + _stacks(rank)
        for number, rank in waiting.items()
    }
    return answers, deaths, late


def _wait_for_any(ranks: list[Rank], deadline: float) -> bool:
    sources: list[Any] = [rank.wire for rank in ranks]
    sources += [rank.process.sentinel for rank in ranks]
    return bool(wait(sources, max(0.0, deadline - time.monotonic())))


def _receive(rank: Rank) -> Answer | str | None:
    """The answer of a rank, how it died, or ``None`` when it has said nothing yet."""
    ended = not rank.process.is_alive()
    try:
        if rank.wire.poll():
            answer: Answer = rank.wire.recv()
            return answer
    except (EOFError, OSError):
        ended = True
    if not ended:
        return None
    rank.process.join(5)
    code = rank.process.exitcode
    if code is not None and code < 0:
        stacks = tail(rank.place.stacks)
        return f"died of {signal.Signals(-code).name}{stacks and f'; {stacks}'}"
    return f"ended with exit status {code}"


def _stacks(rank: Rank) -> str:
    """The Python stacks of a silent rank, which writes them on SIGUSR1."""
    os.kill(rank.process.pid or 0, signal.SIGUSR1)
    size, deadline = 0, time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, size = size, rank.place.stacks.stat().st_size
        if size and size == before:
            return rank.place.stacks.read_text(errors="replace")
    return "no stack: the process does not react (stopped?)"


def tail(path: Path) -> str:
    """The end of an output file; empty if there is none."""
    if not path.exists():
        return ""
    return path.read_text(errors="replace")[-_OUTPUT_SHOWN:]


def unfinished(answers: dict[int, Answer], before: int | None) -> dict[int, str]:
    """An error for every rank if they issued different numbers of calls, else none."""
    made = {rank: answer.calls for rank, answer in sorted(answers.items())}
    if len(set(made.values())) == 1:
        return {}
    counts = {
        rank: "group destroyed" if calls is None else calls - (before or 0)
        for rank, calls in made.items()
    }
    text = f"a collective was left unfinished; calls on the default group: {counts}"
    return dict.fromkeys(made, text)
