"""What the commands of ``python -m composable_fsdp`` share: reports and progress."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from composable_fsdp.errors import FSDPError

BAD = 1
"""Exit status: a bad checkpoint, nothing written, or a model that does not fit."""
USAGE = 2
"""Exit status of wrong usage, as that of argparse."""

Report = dict[str, Any]
"""What a command found, as JSON has it."""


class Command(NamedTuple):
    """A command: its help, how it runs, prints its report, and ends."""

    about: str
    epilog: str
    run: Callable[[argparse.Namespace], Report]
    show: Callable[[Report], None]
    status: Callable[[Report], int] = lambda found: 0
    # The exit status if ``run`` raises one of ``errors``, which bad input causes.
    bad: int = BAD
    errors: tuple[type[Exception], ...] = (FSDPError, OSError)


def examples(*lines: str, more: str = "") -> str:
    """Return the end of a command's help: examples, and ``more``."""
    shown = "".join(f"  python -m composable_fsdp {line}\n" for line in lines)
    return f"examples:\n{shown}\n{more}".rstrip("\n") + "\n"


def error_text(error: Exception) -> str:
    """Return the text of an error for people.

    >>> error_text(FileNotFoundError(2, "No such file or directory", "a/plan.png"))
    'a/plan.png: No such file or directory.'
    """
    # The rank is that of a job which the command made up.
    if isinstance(error, FSDPError):
        error.rank = None
    # "[Errno 2]" says nothing to most readers.
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error)


class Progress:
    """A line on standard error with the part of ``total`` bytes that is done, which
    disappears at the end of the block."""

    def __init__(self, label: str, total: int = 0, *, wanted: bool = True) -> None:
        # A log file must not receive a line per update.
        self._wanted = wanted and sys.stderr.isatty()
        self._label, self._total = label, total
        self._done, self._shown = 0, 0.0

    def advance(self, more: int) -> None:
        """Take note of ``more`` bytes."""
        self.show(self._done + more, self._total)

    def show(self, done: int, total: int) -> None:
        """Show the bytes done so far."""
        self._done = done
        # Writing to a terminal is slow, so limit the updates.
        if self._wanted and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            # ``total`` may be an estimate, and smaller than ``done``.
            share = f"{min(1.0, done / total):4.0%}" if total else "..."
            print(f"\r{self._label} {share}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        self.advance(0)
        return self

    def __exit__(self, *exc: object) -> None:
        # Returns to the start of the line, and erases the line.
        if self._wanted:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
