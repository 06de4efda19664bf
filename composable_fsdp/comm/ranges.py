"""Ranges with the names of units, for the traces of ``torch.profiler``.

While a profiler runs, the collectives, the forward and the backward of each unit are
ranges in its trace::

    composable_fsdp::forward (blocks.0)
        composable_fsdp::all_gather (blocks.0)
        composable_fsdp::all_gather_wait (blocks.0)
    composable_fsdp::backward (blocks.0)

Without one, a step reads two variables per range: callers ask
``profiler._is_profiler_enabled`` (private, checked on torch 2.13) before they open a
range, and ``OPEN`` before they close a range.
"""

from __future__ import annotations

from typing import Any

import torch

from composable_fsdp.naming import ROOT_NAME

profiler: Any = torch.autograd.profiler
"""The module whose ``_is_profiler_enabled`` tells whether a profiler runs."""

OPEN: dict[tuple[str, int], list[tuple[str, Any]]] = {}
"""The open ranges by kind ("forward" or "backward") and id of the tree's context, the
innermost last: the name of the unit, and torch's ``record_function``."""


def running_unit(stage: str) -> str | None:
    """Return the name of the unit that runs in ``stage``; None if no range is open."""
    # Checkpointing runs forwards in backward, whose ranges are inside.
    for kind in dict.fromkeys((stage, "forward", "backward")):
        for (each, _), ranges in OPEN.items():
            if each == kind and ranges:
                return ranges[-1][0]
    return None


def range_name(kind: str, unit: str | None) -> str:
    """Return the name of a range; ``unit`` is None for all units together.

    >>> range_name("forward", "blocks.0"), range_name("all_reduce", None)
    ('composable_fsdp::forward (blocks.0)', 'composable_fsdp::all_reduce')
    """
    # The name of the root has parentheses of its own.
    of_unit = f" ({unit})" if unit else "" if unit is None else f" {ROOT_NAME}"
    return f"composable_fsdp::{kind}{of_unit}"


def collective_range(op: str, unit: str | None) -> Any:
    """Return a context manager that is the range of a collective."""
    return profiler.record_function(range_name(op, unit))


def begin_range(kind: str, tree: object, unit: str) -> None:
    """Open the range of a unit's forward or backward, nested as the units are."""
    # The range of a unit beside this one is closed; those of units below are opened
    # again inside the new range.
    opened = OPEN.setdefault((kind, id(tree)), [])
    below: list[str] = []
    while opened and not _is_at_or_below(unit, opened[-1][0]):
        name, record = opened.pop()
        record.__exit__(None, None, None)
        # The output of the last unit of a model is an output of the root, too, and the
        # hook of the root runs right after that of the unit, which is empty so far.
        if _is_at_or_below(name, unit):
            below.append(name)
    for each in (unit, *reversed(below)):
        # Torch's own ranges of a backward are those of nodes, so a range over several
        # nodes begins inside a node's range and ends inside another.
        record = profiler.record_function(range_name(kind, each))
        record.__enter__()
        opened.append((each, record))


def _is_at_or_below(unit: str, above: str) -> bool:
    """Return whether the name ``unit`` is that of ``above`` or of a module below."""
    return not above or f"{unit}.".startswith(f"{above}.")


def end_range(kind: str, tree: object, unit: str) -> None:
    """Close the innermost range of the unit, if any, and the ranges inside."""
    opened = OPEN.get((kind, id(tree)), [])
    # The profiler may have started after the begin.
    while any(name == unit for name, _ in opened):
        name, record = opened.pop()
        record.__exit__(None, None, None)
        if name == unit:
            break
    # An empty table tells callers that nothing is left to close.
    if not opened:
        OPEN.pop((kind, id(tree)), None)


def end_all_ranges(tree: object) -> None:
    """Close all ranges of a tree, which an error may have left open."""
    # The innermost first, as torch expects of ranges on a thread.
    for kind in ("forward", "backward"):
        for _, record in reversed(OPEN.pop((kind, id(tree)), [])):
            record.__exit__(None, None, None)
