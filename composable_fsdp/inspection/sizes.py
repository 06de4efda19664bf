"""Sizes and other numbers on the command line: text to bytes, counts and bounds."""

from __future__ import annotations

import argparse
import math
import re


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
    """Return a positive number; "1e9" and "70_000" are numbers, too.

    Raises: argparse.ArgumentTypeError, for another text; also for "nan" and "inf".
    """
    # float() reads "1e9", which int() does not.
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    # Neither "inf" nor "nan" is an integer.
    if not number.is_integer() or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(number)


def bound(text: str) -> float:
    """Return a number of 0 or above.

    Raises: argparse.ArgumentTypeError, for another text; also for "nan" and "inf".

    >>> bound("1e-6"), bound("0")
    (1e-06, 0.0)
    """
    # A comparison with NaN is always false, so NaN would accept everything.
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or above")
    return found


def counted(number: int, what: str) -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{number} {what}{'' if number == 1 else 's'}"
