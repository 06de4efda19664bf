"""What texts of the tools share; nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
"""Short names of dtypes, and the names of torch."""


def counted(number: int, what: str) -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    r"""Return ``text`` with characters that a terminal would obey written as escapes.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )


def byte_size(text: str, what: str = "") -> int:
    """Return a size such as "5GB" (powers of 1000) or "80GiB" (of 1024) in bytes.

    Raises: ValueError, which begins with ``what``, for another text.

    >>> byte_size("5GB"), byte_size("80 GiB"), byte_size("1.5k")
    (5000000000, 85899345920, 1500)
    """
    text = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?))?(B?)", text, re.IGNORECASE)
    # "80" means 80 GiB to one reader and 80 bytes to another.
    if match and not match[2] and not match[4]:
        raise ValueError(
            f"{what}{text!r} has no unit; write {text}GiB, or {text}B for bytes"
        )
    number = 0
    if match:
        base = 1024 if match[3] else 1000
        # The position in the string is the power; a space stands for no unit.
        number = int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))
    if number < 1:
        raise ValueError(
            f"{what}{text!r} is no size; expected a number with KB, MB, GB or TB, or "
            "KiB, MiB, GiB or TiB, as 5GB or 80GiB"
        )
    return number


def version() -> str:
    """Return the version of this package, or that of the checkout."""
    found = installed("composable-fsdp")
    if found is not None:
        return found
    # An installed package lies in ``site-packages``, beside no such file.
    project = Path(__file__).parents[2] / "pyproject.toml"
    text = project.read_text() if project.is_file() else ""
    match = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    return f"{match[1]} (not installed)" if match else "unknown"


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
