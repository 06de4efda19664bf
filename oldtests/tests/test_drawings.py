"""The pictures of the documentation are those that ``docs/draw.py`` draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A folder with new pictures."""
    pytest.importorskip("matplotlib")
    names: dict[str, Any] = runpy.run_path(str(DOCS / "draw.py"))
    names["block"].__globals__["FOLDER"] = tmp_path
    for name in ("block", "layout", "step", "memory", "checkpoint", "host"):
        names[name]()
    return tmp_path


def test_the_pictures_are_up_to_date(drawn: Path) -> None:
    """The memory of a step is simulated anew, and equals the picture."""
    for path in sorted(drawn.glob("*.svg")):
        assert path.read_text() == (DOCS / "_static" / path.name).read_text(), path.name
    assert len(list(drawn.glob("*.svg"))) == 6
