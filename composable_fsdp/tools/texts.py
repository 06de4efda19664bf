"""What texts of the tools share: numbers with nouns, what was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def counted(number: int, what: str) -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return a question with what is closest to ``word``; empty if nothing is close."""
    near = get_close_matches(word, list(known), n=most, cutoff=0.6 - 0.2 * (most > 1))
    return f" Did you mean {' or '.join(near)}?" if near else ""
