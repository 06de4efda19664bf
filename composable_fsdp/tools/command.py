"""What the commands of ``python -m composable_fsdp`` share: options and progress."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from composable_fsdp.errors import FSDPError

BAD = 1
"""Exit status: a bad checkpoint, nothing written, or a model that does not fit."""
USAGE = 2
"""Exit status of wrong usage, as that of argparse."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}

Report = dict[str, Any]
"""What a command found, as JSON has it."""

Advance = Callable[[int], None]
"""A function that receives the bytes done since the last call."""


class UsageError(FSDPError, ValueError):
    """A command that cannot run as it was written; the exit status is 2."""


class Option(NamedTuple):
    """An option or an argument: name, group in the help, and words for argparse."""

    name: str
    group: str
    words: dict[str, Any]


def option(name: str, about: str, *, group: str = "", **words: Any) -> Option:
    """Return an option; ``words`` are those of ``add_argument``."""
    return Option(name, group, {"help": about, **words})


class Command(NamedTuple):
    """A command.

    Args:
        about: what it does, in a line.
        epilog: examples, and further text of its help.
        options: its options and arguments.
        run: returns the report; raises UsageError, FSDPError or OSError.
        show: prints a report as text.
        status: returns the exit status of a report. Default: 0.
        bad: the exit status if ``run`` raises FSDPError or OSError. Default 1.
    """

    about: str
    epilog: str
    options: Sequence[Option]
    run: Callable[[argparse.Namespace], Report]
    show: Callable[[Report], None]
    status: Callable[[Report], int] = lambda found: 0
    bad: int = BAD


WEIGHTS_ONLY = option(
    "--weights-only",
    "leave optimizer and extra state alone, unread",
    action="store_true",
)


def error_text(error: Exception) -> str:
    """Return the text of an error for people.

    >>> error_text(FileNotFoundError(2, "No such file or directory", "a/plan.png"))
    'a/plan.png: No such file or directory.'
    """
    # "[Errno 2]" says nothing to most readers.
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error)


def byte_size(text: str) -> int:
    """Return a size such as "5GB" (powers of 1000) or "80GiB" (of 1024) in bytes.

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
    """Return a finite number of 0 or above."""
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


def shape_of(text: str) -> tuple[int, ...]:
    """Return a shape such as "4x2048"."""
    try:
        return tuple(count(each) for each in text.lower().split("x"))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; expected numbers with x between them, as 4x2048"
        ) from None


def words(text: str) -> list[str]:
    """Return texts that are separated by commas, without spaces around them."""
    return [each for each in map(str.strip, text.split(",")) if each]


def dtype_name(text: str) -> str:
    """Return the name in ``DTYPES`` that ``text`` means, as "bf16"."""
    name = text.lower().removeprefix("torch.")
    return _SHORT.get(name, name)


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
