"""What every benchmark prints: titles, aligned columns, figures beside their goals."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence

import torch


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


def say_versions(more: str = "") -> None:
    """What the figures below were made with; ``more`` is said after it."""
    say(f"torch {torch.__version__}, Python {platform.python_version()}{more}")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and columns: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    say(f"\n{title}")
    for cells in (header, *rows):
        first, *numbers = (
            f"{cell:{'<' if place == 0 else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        say("  " + "  ".join((first, *numbers)))


def fixed(values: Iterable[float], digits: int) -> list[str]:
    """Each number with so many digits behind the point."""
    return [f"{value:.{digits}f}" for value in values]


def ratios(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    goals: Mapping[str, str],
) -> None:
    """Print ours over each sharding peer that ran, for each field of ``goals``.

    A goal is for ours over FSDP2; an empty one is none.
    """
    peers = [name for name in ("fsdp1", "fsdp2") if name in rows]
    if "ours" not in rows or not peers:
        return
    lines = [
        (f"ours/{peer}", *fixed((rows["ours"][f] / rows[peer][f] for f in goals), 3))
        for peer in peers
    ]
    if any(goals.values()) and "fsdp2" in peers:
        lines.append(("goal", *goals.values()))
    table(title, ("", *(field.replace("_", " ") for field in goals)), lines)
