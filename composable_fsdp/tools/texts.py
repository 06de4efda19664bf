"""What texts of the tools share: tables, numbers with nouns."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from difflib import get_close_matches

import torch


def counted(number: int, what: str) -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return a question with what is closest to ``word``; empty if nothing is close."""
    near = get_close_matches(word, list(known), n=most, cutoff=0.6 - 0.2 * (most > 1))
    return f" Did you mean {' or '.join(near)}?" if near else ""


def dtype_text(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Container[int]
) -> list[str]:
    """Return the lines of a table whose columns ``left`` are left-aligned."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
