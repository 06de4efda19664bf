"""Sizes on the command line: text to bytes."""

from __future__ import annotations

import argparse
import re


def byte_size(text: str) -> int:
    """Return a size such as "5GB" or "80GiB" in bytes.

    Units with an "i" are powers of 1024, all others powers of 1000.

    Raises: argparse.ArgumentTypeError, if ``text`` is no size.

    >>> byte_size("5GB"), byte_size("80 GiB"), byte_size("1.5k")
    (5000000000, 85899345920, 1500)
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE
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
