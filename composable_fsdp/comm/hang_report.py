"""The files of a hang report: what each rank did when a collective did not end.

A rank that has waited too long chooses a directory, and every rank whose watch thread
lives writes ``rank_N.json`` there::

    rank, time, program      who writes, when, and the line of the program that runs
    waits                    the operations in which the rank waits
    numbers                  operations issued and done, per process group
    ranks                    what the other ranks said, in words
    operations               the last collectives of each process group
    states                   the state of each unit (``describers``)
    stacks                   the Python stacks of all threads

torch's flight recorder is added as ``rank_N.torch`` if NCCL records
(``TORCH_NCCL_TRACE_BUFFER_SIZE``). Private: ``torch._C._distributed_c10d.
_dump_nccl_trace``, checked on torch 2.13.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable_fsdp.comm.operations import (
    OperationRecord,
    operation_logs,
    waiting_in,
)
from composable_fsdp.comm.progress import running_in, waited_for
from composable_fsdp.comm.torch_waits import TorchWait
from composable_fsdp.naming import listed

DIRECTORY_VARIABLE = "COMPOSABLE_FSDP_HANG_DIR"
"""Environment variable: the parent of report directories. Default: the directory for
temporary files."""

ENDED = "has ended"
"""The first words of ``Position.program`` after the end of a program."""

MOST_RANKS = 32
"""Number of other ranks whose positions are read at most."""

_KEY = "composable_fsdp/watch/report"
_PACKAGE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_LAST = 64
"""Number of operations per group in a report."""

describers: list[Callable[[], list[Any]]] = []
"""Functions that return the states of all units, for JSON; registered by higher layers.
"""


class Position(NamedTuple):
    """Where a rank is, as it told the others."""

    rank: int
    at: float
    """Seconds since the epoch."""
    program: str
    """The line of the user's program, and the function it has called."""
    groups: dict[str, list[Any]]
    """By name of the group: number of operations issued, the title of the operation
    in which the rank waits (or None), the number of this operation, its kind, and the
    seconds of the wait."""
    torch_wait: Any = None
    """The fields of a ``TorchWait``, if the rank waits in a collective of torch."""

    @property
    def has_ended(self) -> bool:
        """Whether the program of the rank has ended."""
        return self.program.startswith(ENDED)

    def told(self, group: str) -> str:
        """Say where the rank is in ``group``, in words."""
        ago = f"{max(0.0, time.time() - self.at):.0f} s ago"
        number, title, *_, waited = self.groups.get(group, [0, None, 0, "", 0.0])
        where = None if title is None else lower(title)
        if where is None and self.torch_wait is not None:
            wait = TorchWait(*self.torch_wait)
            where, waited = f"torch's {wait.function}", wait.seconds
        # A program that was interrupted has ended in the middle of an operation.
        if where is not None and not self.has_ended:
            return f"rank {self.rank} waits {waited:.0f} s in {where}"
        return (
            f"rank {self.rank} finished operation {number} and {self.program} ({ago})"
        )


def lower(title: str) -> str:
    """Return ``title`` inside a sentence."""
    return title[:1].lower() + title[1:]


def begin(store: Any, title: str) -> Path:
    """Choose the directory of a report, and announce the directory to all ranks."""
    parent = Path(os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())
    name = f"composable_fsdp_hang_{time.strftime('%Y%m%d_%H%M%S')}"
    # Several ranks wait in the same collective, and begin their reports at about the
    # same time: the first rank that reports chooses for all ranks that report soon
    # after, so that the files of a hang lie together.
    known = store.compare_set(_KEY, "", json.dumps([name, time.time(), title]))
    first, at, _ = json.loads(known)
    if time.time() - at > _SAME:
        store.set(_KEY, json.dumps([name, time.time(), title]))
        first = name
    return parent / str(first)


_written: set[str] = set()
"""Names of the directories to which this rank has written."""

_SAME = 120.0
"""Seconds in which reports of several ranks share a directory."""


def answer(store: Any, main: int | None) -> None:
    """Write this rank's file of a report that another rank has begun."""
    if not store.check([_KEY]):
        return
    name, at, _ = json.loads(store.get(_KEY))
    # Once: a later question must not replace the state at the time of the hang.
    if time.time() - at < _SAME and name not in _written:
        parent = Path(os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())
        write(parent / str(name), main, ())


def write(path: Path, main: int | None, ranks: Sequence[str]) -> str:
    """Write this rank's file.

    Args:
        path: the directory of the report, created if needed.
        main: the thread that runs the program.
        ranks: what the other ranks said.

    Returns: the path, or why the file could not be written. Collective: none.
    """
    rank = dist.get_rank()
    _written.add(path.name)
    # Text, and no pickles: a report is read by people, perhaps on another machine.
    groups: dict[str, list[str]] = {}
    waits: list[str] = []
    numbers: dict[str, list[int]] = {}
    for log in operation_logs():
        found = [OperationRecord.of(each) for each in list(log.operations)[-_LAST:]]
        groups[log.name] = [str(record) for record in found]
        done = [record.number for record in found if record.state == "done"]
        numbers[log.name] = [log.number, max(done, default=0)]
        if (waited := waiting_in(log) or running_in(log)) is not None:
            title = OperationRecord.of(waited).title
            waits.append(f"waits {waited_for(waited):.0f} s in {title}")
    report = {
        "rank": rank,
        "world_size": dist.get_world_size(),
        "time": time.time(),
        "program": program(main),
        "waits": "; ".join(waits),
        "ranks": list(ranks),
        "numbers": numbers,
        "operations": groups,
        "states": [state for describe in describers for state in describe()],
        "stacks": stacks(),
    }
    # A full disk must not end the thread, which still has to print its line.
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rank_{rank}.json").write_text(json.dumps(report, indent=1))
        _dump_torch(path / f"rank_{rank}.torch")
    except OSError as error:
        return f"not written ({error})"
    return str(path)


def _dump_torch(path: Path) -> None:
    """Write torch's flight recorder, if NCCL records."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        with suppress(RuntimeError):
            path.write_bytes(dump())


def stacks() -> dict[str, list[str]]:
    """Return the Python stack of each thread, by name of the thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident) or str(ident): traceback.format_stack(frame)
        for ident, frame in sys._current_frames().items()
    }


def program(main: int | None) -> str:
    """Return which line of the user's program runs, in words.

    >>> import threading
    >>> program(None)
    'runs no Python code'
    """
    # ``_current_frames`` shows other threads without stopping them; the frames may move
    # on meanwhile, which a report can bear.
    frame = sys._current_frames().get(main) if main is not None else None
    called = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        # The stack is read from inside, and the function that the line has called is
        # remembered, which tells ``optimizer.step`` from a data loader.
        # The innermost line outside of torch, this package and the standard library.
        if _is_users(path):
            inside = f", in {called}" if called else ""
            return (
                f"is at {path.name}:{frame.f_lineno} ({frame.f_code.co_name}){inside}"
            )
        called, frame = frame.f_code.co_name, frame.f_back
    return f"is in {called}" if called else "runs no Python code"


def _is_users(path: Path) -> bool:
    """Return whether a file is the user's: not torch's, ours, or Python's."""
    own = path.is_relative_to(_PACKAGE) or path.is_relative_to(_TORCH)
    return not own and not path.is_relative_to(Path(os.__file__).parent)


def print_line(waits: str, words: Sequence[str], written: str) -> None:
    """Print a line about a hang to the standard error.

    Args:
        waits: which rank waits for how long, and for which operation.
        words: where the other ranks are.
        written: where the report is.

    Collective: none.
    """
    sys.stderr.write(
        f"composable_fsdp: {waits}; {listed(words, '; ')}. Report: {written}; "
        "python -m composable_fsdp hang-report merges the files of all ranks.\n"
    )
    sys.stderr.flush()


def tell(
    others: Sequence[int], said: dict[int, Position], group: str, since: float
) -> list[str]:
    """Return where other ranks are in ``group``, a text per rank.

    Args:
        others: the ranks.
        said: the positions of those that have told theirs.
        group: the name of the group.
        since: the oldest time of an answer.

    Returns: ranks without an answer first, then those that are behind. Collective:
    none.
    """
    silent, heard = [], []
    for rank in others[:MOST_RANKS]:
        position = said.get(rank)
        if position and (position.at > since or position.has_ended):
            done = position.groups.get(group, [0])[0]
            heard.append((done, rank, position.told(group)))
        else:
            silent.append(f"rank {rank} does not answer")
    rest = [f"rank {rank} was not asked" for rank in others[MOST_RANKS:]]
    return [*silent, *(text for *_, text in sorted(heard)), *rest]
