"""The differences of two plans, as numbers and as text."""

from __future__ import annotations

from typing import Any

from composable_fsdp.inspection.plan_report import KINDS, Report
from composable_fsdp.inspection.plan_text import Table
from composable_fsdp.naming import size_text


def differences(first: Report, second: Report) -> Report:
    """Return all that differs: each entry is a pair, with None for what is absent."""
    return {
        "options": _differing(
            {**first["model"], **first["options"]},
            {**second["model"], **second["options"]},
        ),
        "bytes": _differing(_bytes(first), _bytes(second)),
        "calls": _differing(_calls(first), _calls(second)),
        "units": _differing(_units(first), _units(second)),
    }


def _differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the pairs of values that differ, in the order of the first dict."""
    return {
        name: [first.get(name), second.get(name)]
        # A dict keeps the order of names, a set would not.
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    }


def _bytes(report: Report) -> dict[str, int]:
    """Return the bytes per rank by what they are."""
    # The order is that of the report: what stays, what comes and goes, what is sent.
    return {
        "parameters": report["total"]["parameters"],
        "gradients": report["total"]["gradients"],
        "optimizer state": report["total"]["optimizer"],
        **{
            f"at the peak: {words}": report["peak"]["kinds"][name]
            for name, words in KINDS.items()
        },
        "peak": report["peak"]["bytes"],
        "on the host": report["host_bytes"],
        **{
            f"sent by {name.replace('_', '-')}s": each["bytes"]
            for name, each in report["step"].items()
        },
    }


def _calls(report: Report) -> dict[str, int]:
    """Return the calls per step by collective."""
    return {
        name.replace("_", "-") + "s": each["calls"]
        for name, each in report["step"].items()
    }


def _units(report: Report) -> dict[str, str]:
    """Return a description of each row of units, by name."""
    return {
        row["unit"]: f"{row['times']} x {row['class']}, {row['numel']:,} elements, "
        f"{size_text(row['sharded'])} per rank"
        for row in report["rows"]
    }


def parts_of_difference(found: Report, names: tuple[str, str]) -> list[str | Table]:
    """Return the differences as sentences and tables.

    ``names`` are the texts that named the two plans.
    """
    parts: list[str | Table] = [f"A: {names[0]}", f"B: {names[1]}"]
    # Two spellings of one plan have no differences.
    if not any(found.values()):
        return [*parts, "The two plans are equal."]
    if found["options"]:
        rows = [[name, *map(_value, pair)] for name, pair in found["options"].items()]
        parts.append(Table("Options and models", ["", "A", "B"], rows, 3))
    if found["bytes"]:
        rows = [
            [name, size_text(a), size_text(b), _change(a, b)]
            for name, (a, b) in found["bytes"].items()
        ]
        parts.append(Table("Bytes per rank", ["", "A", "B", "B - A"], rows, 1))
    if found["calls"]:
        rows = [
            [name, f"{a:,}", f"{b:,}", f"{b - a:+,}"]
            for name, (a, b) in found["calls"].items()
        ]
        parts.append(Table("Calls per step", ["", "A", "B", "B - A"], rows, 1))
    # Units of equal names that differ stand side by side.
    if found["units"]:
        rows = [[name, *map(_value, pair)] for name, pair in found["units"].items()]
        parts.append(Table("Units", ["unit", "A", "B"], rows, 3))
    return parts


def _value(value: object) -> str:
    """Return a value of an option as text."""
    if value is None:
        return "-"
    # bool is a subclass of int.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else str(value)


def _change(first: int, second: int) -> str:
    """Return the difference of two sizes as text, with the sign and the ratio."""
    sign = "+" if second >= first else "-"
    # A ratio to nothing says nothing.
    ratio = f", {second / first:.2f} x" if first and second else ""
    return f"{sign}{size_text(abs(second - first))}{ratio}"
