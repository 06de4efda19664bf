"""The page of stages shows what a program finds."""

from __future__ import annotations

from pathlib import Path

from tests import stages

PAGE = Path(__file__).parents[1] / "docs" / "development" / "stages.md"


def test_the_page_shows_each_stage_as_it_is() -> None:
    """``python -m tests.stages`` prints the table anew."""
    assert stages.table() in PAGE.read_text()
