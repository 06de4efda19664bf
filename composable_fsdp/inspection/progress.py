"""A progress display on a terminal for long commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PAUSE = 0.1
"""Seconds between two updates of the plain line."""

_ERASE = "\r\x1b[K"
"""Returns to the start of the line, and erases the line."""

Advance = Callable[[int], None]
"""A function that receives the bytes done since the last call."""


@contextmanager
def progress(label: str, total: int, *, wanted: bool = True) -> Iterator[Advance]:
    """Show the share of ``total`` bytes that is done, on standard error.

    The display is a rich progress bar if rich is installed, else a line that is
    overwritten. The display disappears at the end of the block. If standard error is no
    terminal, nothing is shown.

    Returns: a context manager that yields a function; call the function with the bytes
    done since its last call.
    """
    # A log file must not receive a line per update.
    if not wanted or not sys.stderr.isatty():
        yield lambda done: None
        return
    # rich is optional.
    try:
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield from _plain(label, total)
        return
    bar = Progress(
        *Progress.get_default_columns()[:2],
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, advance=done)


@contextmanager
def waiting(label: str, *, wanted: bool = True) -> Iterator[None]:
    """Show on standard error that a block of unknown length runs.

    As ``progress``: a spinner of rich, else the text alone; nothing without a terminal.

    Returns: a context manager.
    """
    if not wanted or not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
    except ImportError:
        sys.stderr.write(f"{label} ...")
        sys.stderr.flush()
        try:
            yield
        finally:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
        return
    # A thread of rich draws; the block runs in this thread.
    with Console(stderr=True).status(label):
        yield


def _plain(label: str, total: int) -> Iterator[Advance]:
    """Show the progress as a line that is overwritten."""
    done, shown = 0, 0.0

    def advance(more: int) -> None:
        nonlocal done, shown
        done += more
        # Writing to a terminal is slow, so limit the updates.
        if time.monotonic() - shown > _PAUSE:
            shown = time.monotonic()
            # ``total`` may be an estimate, and smaller than ``done``.
            share = min(1.0, done / total) if total else 1.0
            sys.stderr.write(f"\r{label} {share:4.0%}")
            sys.stderr.flush()

    try:
        yield advance
    finally:
        # Return to the start of the line, and erase the line.
        sys.stderr.write(_ERASE)
        sys.stderr.flush()
