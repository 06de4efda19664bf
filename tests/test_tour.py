"""Files and functions that ``docs/tour.md`` names exist, so that a rename shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"((?:\w+/)*\w+\.py)(?::(\w+(?:\.\w+)*))?")
"""``folder/file.py``, or ``folder/file.py:function`` or ``:Class.method``."""


def definitions(source: str) -> set[str]:
    """Return the functions and classes of ``source``, methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return found


def missing(text: str) -> list[str]:
    """Return the names in ``text`` whose file or function does not exist."""
    absent = []
    for path, name in NAMED.findall(text):
        places = (ROOT / "composable_fsdp" / path, ROOT / path)
        file = next((each for each in places if each.is_file()), None)
        if file is None or (name and name not in definitions(file.read_text())):
            absent.append(f"{path}:{name}" if name else path)
    return absent


def test_every_file_and_function_of_the_tour_exists() -> None:
    """``docs/tour.md`` names no file and no function that is not there."""
    text = (ROOT / "docs" / "tour.md").read_text()

    assert missing(text) == []
    assert len(NAMED.findall(text)) > 50


def test_a_name_that_is_gone_is_told() -> None:
    """A wrong file, function and method are each found."""
    text = (
        "`runtime/unshard.py:unshard` `runtime/gone.py` `runtime/unshard.py:gone` "
        "`storage/part.py:PartMaker.gone` `storage/part.py:PartMaker.make`"
    )

    assert missing(text) == [
        "runtime/gone.py",
        "runtime/unshard.py:gone",
        "storage/part.py:PartMaker.gone",
    ]
