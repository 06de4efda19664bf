"""Markers name rows that exist in ``docs/development/requirements.md``."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROW = re.compile(r"^\| ([A-Z]\d?-\d\d) \| \S", re.MULTILINE)
FOLDERS = ("tests", "property_tests")


def rows(text: str) -> list[str]:
    """Ids in the first column of the tables in ``text``, in order."""
    return ROW.findall(text)


def marked(text: str) -> list[str]:
    """Arguments of ``...req(...)`` calls in Python source; literals as their value."""
    return [
        str(arg.value) if isinstance(arg, ast.Constant) else ast.unparse(arg)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "req"
        for arg in node.args
    ]


@pytest.fixture
def listed() -> list[str]:
    return rows((REPOSITORY / "docs" / "development" / "requirements.md").read_text())


def test_rows_and_marks_are_the_same(listed: list[str]) -> None:
    """Each row has a test, and no test claims a row that the documentation lacks."""
    found = {
        row
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
        if ".req(" in (text := path.read_text())
        for row in marked(text)
    }

    assert found == set(listed)


def test_no_row_is_listed_twice(listed: list[str]) -> None:
    """Each id stands once, and the list is not empty."""
    assert listed
    assert sorted(listed) == sorted(set(listed))
