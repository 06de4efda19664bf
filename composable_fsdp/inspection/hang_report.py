"""``python -m composable_fsdp hang-report``: merge the files of a hang report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from composable_fsdp.errors import CheckpointError

ABOUT = "merge the ranks' files of a hang"

EXAMPLES = """\
examples:
  python -m composable_fsdp hang-report composable_fsdp_hang_20261122_101530
  python -m composable_fsdp hang-report DIR --json

exit status: 0 merged, 1 no file of a hang report there, or damaged, 2 wrong usage
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hang-report`` to its parser."""
    command.add_argument(
        "path", type=Path, metavar="DIR", help="the directory that a rank has printed"
    )


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Return what the files of a hang report say together; see ``merge``."""
    return merge(given.path)


def show(merged: dict[str, Any]) -> None:
    """Print the merged report."""
    print(text_of(merged))


def status(merged: dict[str, Any]) -> int:
    """Return the exit status of reports that could be read: 0."""
    return 0


def merge(path: Path) -> dict[str, Any]:
    """Return what the files of a hang report say together.

    Args:
        path: the directory, with a file ``rank_N.json`` per rank that could write.

    Returns: for JSON: ``ranks`` (a record per rank), ``missing`` (ranks without a
        file), ``look_at`` (the ranks that the others wait for) and ``why``.
    Raises: CheckpointError, if the directory has no file of a hang report.
    """
    reports = [_read(each) for each in sorted(path.glob("rank_*.json"))]
    if not reports:
        raise CheckpointError(
            f"{path} has no file rank_N.json of a hang report. A rank that waits in a "
            "collective for long prints the directory that it writes."
        )
    reports.sort(key=lambda report: int(report["rank"]))
    written = {report["rank"] for report in reports}
    world = max(report["world_size"] for report in reports)
    missing = [rank for rank in range(world) if rank not in written]
    # The group in which ranks have come differently far: the ranks that have issued
    # fewest collectives are those for which the others wait. Ranks of another group are
    # not compared, because each group has a sequence of its own.
    spread = {
        name: {r["rank"]: r["numbers"][name] for r in reports if name in r["numbers"]}
        for report in reports
        for name in report["numbers"]
    }
    behind: list[int] = []
    group = ""
    for name, numbers in spread.items():
        issued = [number for number, _ in numbers.values()]
        if max(issued) > min(issued):
            group = name
            behind = [rank for rank, (n, _) in numbers.items() if n == min(issued)]
            break
    look_at, why = behind, f"they have issued fewest collectives of group {group!r}"
    # A rank without a file is worth more: its thread could not even answer.
    if missing:
        look_at, why = missing, "they wrote no file: ended, stopped, or another machine"
    # Equal numbers: a rank that waits in no collective is between two of them, or in a
    # collective of another library.
    if not look_at:
        look_at = [r["rank"] for r in reports if not r["waits"]]
        why = "they wait in no collective of this package"
    return {"ranks": reports, "missing": missing, "look_at": look_at, "why": why}


def _read(path: Path) -> dict[str, Any]:
    """Return a rank's report. Raises: CheckpointError, if the file is damaged."""
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        # The keys that ``merge`` and ``text_of`` read, in the types of the writer.
        range(report["rank"], report["world_size"])
        report["waits"], report["program"], dict(report["operations"])
        report["numbers"] = {k: (int(a), b) for k, (a, b) in report["numbers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a file of a hang report ({type(error).__name__}: {error}). "
            "The rank may have been killed while writing; remove the file to merge the "
            "others."
        ) from error
    return report


def text_of(merged: dict[str, Any]) -> str:
    """Return the merged report in lines, the ranks to look at first."""
    lines = []
    if merged["look_at"]:
        ranks = ", ".join(map(str, merged["look_at"]))
        lines.append(f"look at rank {ranks} first: {merged['why']}")
    else:
        lines.append("all ranks wait, in the same number of collectives")
    for report in merged["ranks"]:
        waits = report["waits"] or "waits in no collective"
        lines.append(f"rank {report['rank']}: {waits}; {report['program']}")
        for name, operations in report["operations"].items():
            if operations:
                lines.append(f"    last in group {name}: {operations[-1]}")
    return "\n".join(lines)
