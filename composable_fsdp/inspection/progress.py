"""How far a long command is, for whoever watches a terminal, and for nobody else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PAUSE = 0.1
"""Seconds between two updates of the plain line."""

Advance = Callable[[int], None]


@contextmanager
def progress(label: str, total: int, *, wanted: bool = True) -> Iterator[Advance]:
    """Show how much of ``total`` bytes is done; yields what is to be called with bytes.

    On standard error, and only if that is a terminal: with rich if it is installed,
    else as one line that is written over. Gone at the end.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda done: None
        return
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


def _plain(label: str, total: int) -> Iterator[Advance]:
    done, shown = 0, 0.0

    def advance(more: int) -> None:
        nonlocal done, shown
        done += more
        if time.monotonic() - shown > _PAUSE:
            shown = time.monotonic()
            share = min(1.0, done / total) if total else 1.0
            sys.stderr.write(f"\r{label} {share:4.0%}")
            sys.stderr.flush()

    try:
        yield advance
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
