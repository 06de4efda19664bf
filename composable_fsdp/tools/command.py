"""What the commands of ``python -m composable_fsdp`` share: numbers and progress."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

BAD = 1
"""Exit status: a bad checkpoint, nothing written, or a model that does not fit."""
USAGE = 2
"""Exit status of wrong usage, as that of argparse."""

Report = dict[str, Any]
"""What a command found, as JSON has it."""

Advance = Callable[[int], None]
"""A function that receives the bytes done since the last call."""

_PAUSE = 0.1
"""Seconds between two updates of a progress line."""

_ERASE = "\r\x1b[K"
"""Returns to the start of the line, and erases the line."""


class Command(NamedTuple):
    """A command.

    Args:
        about: what it does, in a line.
        epilog: examples, and further text of its help.
        add_arguments: adds its arguments to its parser.
        run: returns the report; raises UsageError, FSDPError or OSError.
        show: prints a report as text.
        status: returns the exit status of a report. Default: 0.
        bad: the exit status if ``run`` raises FSDPError or OSError. Default 1.
    """

    about: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]
    show: Callable[[Report], None]
    status: Callable[[Report], int] = lambda found: 0
    bad: int = BAD


def byte_size(text: str) -> int:
    """Return a size such as "5GB" or "80GiB" in bytes.

    Units with an "i" are powers of 1024, all others powers of 1000.

    Raises: argparse.ArgumentTypeError, if ``text`` is no size.

    >>> byte_size("5GB"), byte_size("80 GiB"), byte_size("1.5k")
    (5000000000, 85899345920, 1500)
    """
    text = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?))?(B?)", text, re.IGNORECASE)
    # "80" means 80 GiB to one reader and 80 bytes to another.
    if match and not match[2] and not match[4]:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit; write {text}GiB, or {text}B for bytes"
        )
    number = 0
    if match:
        base = 1024 if match[3] else 1000
        # The position in the string is the power; a space stands for no unit.
        number = int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; expected a number with KB, MB, GB or TB, or KiB, "
            "MiB, GiB or TiB, as 5GB or 80GiB"
        )
    return number


def count(text: str) -> int:
    """Return a positive number; "1e9" and "70_000" are numbers, too."""
    number = _number(text)
    if not number.is_integer() or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(number)


def bound(text: str) -> float:
    """Return a number of 0 or above, which is finite.

    >>> bound("1e-6"), bound("0")
    (1e-06, 0.0)
    """
    found = _number(text)
    # A comparison with NaN is always false, so NaN would accept everything.
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or above")
    return found


def _number(text: str) -> float:
    """Return the number that ``text`` is; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def words(text: str) -> list[str]:
    """Return texts that are separated by commas, without spaces around them."""
    return [each for each in map(str.strip, text.split(",")) if each]


def counted(number: int, what: str) -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@contextmanager
def progress(label: str, total: int = 0, *, wanted: bool = True) -> Iterator[Advance]:
    """Show a line on standard error that tells how much of ``total`` bytes is done.

    Without ``total`` the line has the label alone. The line disappears at the end of
    the block; without a terminal nothing is shown.

    Returns: a context manager that yields a function; call the function with the bytes
    done since its last call.
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
        if time.monotonic() - shown > _PAUSE:
            shown = time.monotonic()
            # ``total`` may be an estimate, and smaller than ``done``.
            share = f"{min(1.0, done / total):4.0%}" if total else "..."
            sys.stderr.write(f"\r{label} {share}")
            sys.stderr.flush()

    advance(0)
    try:
        yield advance
    finally:
        sys.stderr.write(_ERASE)
        sys.stderr.flush()
