"""What the commands of ``python -m composable_fsdp`` share: reports and progress."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from composable_fsdp.errors import FSDPError

BAD = 1
"""Exit status: a bad checkpoint, nothing written, or a model that does not fit."""
USAGE = 2
"""Exit status of wrong usage, as that of argparse."""

Report = dict[str, Any]
"""What a command found, as JSON has it."""

Advance = Callable[[int], None]
"""A function that receives the bytes done since the last call."""


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


@contextmanager
def progress(label: str, total: int = 0, *, wanted: bool = True) -> Iterator[Advance]:
    """Show a line on standard error, with the part of ``total`` bytes that is done.

    The line disappears at the end of the block. Yields a function, to be called with
    the bytes done since its last call.
    """
    # A log file must not receive a line per update.
    if not wanted or not sys.stderr.isatty():
        yield lambda done: None
        return
    done, shown = 0, 0.0

    def advance(more: int) -> None:
        nonlocal done, shown
        done += more
        # Writing to a terminal is slow, so limit the updates.
        if time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            # ``total`` may be an estimate, and smaller than ``done``.
            share = f"{min(1.0, done / total):4.0%}" if total else "..."
            sys.stderr.write(f"\r{label} {share}")
            sys.stderr.flush()

    advance(0)
    try:
        yield advance
    finally:
        # Returns to the start of the line, and erases the line.
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
