"""Recordings as files: one JSON file per program, and what differs from it."""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import Any

from tests.goldens.programs import PROGRAMS, Recording, run_programs
from tests.support.sharded import RankCount

FOLDER = Path(__file__).parent / "steps"
Golden = list[Recording]
"""The recording of each rank."""


def record_all(ranks: RankCount) -> dict[tuple[str, str], Golden]:
    """Run all programs through both doors; each rank's recording by name and door."""
    found = {}
    for count in sorted({program.ranks for program in PROGRAMS.values()}):
        names = [name for name, each in PROGRAMS.items() if each.ranks == count]
        results = ranks(count).run(run_programs, names)
        found.update({key: [each[key] for each in results] for key in results[0]})
    return found


def as_text(golden: Golden) -> str:
    """Return the file of a program: rank 0 in full, of the others what differs."""
    first = golden[0]
    ranks: list[Any] = [first]
    for other in golden[1:]:
        lines = "as rank 0" if other["lines"] == first["lines"] else other["lines"]
        ranks.append({"lines": lines, "numbers": other["numbers"]})
    for each in ranks:
        each["numbers"] = {
            key: value if value is None else float(f"{value:.6g}")
            for key, value in each["numbers"].items()
        }
    return json.dumps(ranks, indent=0) + "\n"


def read(name: str) -> Golden:
    """Return what the file of a program holds, every rank in full."""
    ranks: Golden = json.loads((FOLDER / f"{name}.json").read_text())
    for each in ranks:
        if each["lines"] == "as rank 0":
            each["lines"] = ranks[0]["lines"]
    return ranks


def write(ranks: RankCount) -> list[str]:
    """Write the files anew; returns the names of those that changed.

    Raises: AssertionError, if the doors differ; nothing is written then.
    """
    found = record_all(ranks)
    texts = {}
    for name in PROGRAMS:
        through_first, *others = (found[name, door] for door in PROGRAMS[name].doors)
        for other in others:
            told = differences(name, through_first, other)
            assert not told, "The doors differ:\n" + "\n".join(told)
        texts[name] = as_text(through_first)
    changed = []
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.stem not in texts:
            path.unlink()
            changed.append(path.stem)
    for name, text in texts.items():
        path = FOLDER / f"{name}.json"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(name)
    return changed


def differences(name: str, recorded: Golden, found: Golden) -> list[str]:
    """Return readable lines on what differs; none if the recordings agree."""
    told: list[str] = []
    tolerance = PROGRAMS[name].tolerance
    for rank, (old, new) in enumerate(zip(recorded, found, strict=True)):
        told += difflib.unified_diff(
            old["lines"],
            new["lines"],
            f"{name}, rank {rank}, recorded",
            f"{name}, rank {rank}, now",
            n=4,
            lineterm="",
        )
        for key in sorted(old["numbers"].keys() | new["numbers"].keys()):
            a = old["numbers"].get(key, "nothing recorded")
            b = new["numbers"].get(key, "nothing recorded")
            if not _close(a, b, tolerance):
                told.append(f"{name}, rank {rank}, {key}: recorded {a}, now {b}")
    return told


def _close(a: object, b: object, tolerance: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance / 100)
    return a == b
