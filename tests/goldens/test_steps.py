"""Recorded steps: collectives, training states and numbers stay as they were.

A refactoring must not change them. Where a change is meant, write the files anew with
``python -m tests.goldens --write`` and read the difference before committing it.
"""

from __future__ import annotations

import pytest

from tests.goldens import recorded
from tests.goldens.programs import PROGRAMS
from tests.goldens.recorded import Golden
from tests.support.sharded import RankCount


@pytest.fixture(scope="module")
def found(ranks: RankCount) -> dict[tuple[str, str], Golden]:
    return recorded.record_all(ranks)


@pytest.mark.req("S1-36", "S1-42", "B-19", "U-03")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_sends_passes_through_and_computes_what_was_recorded(
    found: dict[tuple[str, str], Golden], name: str
) -> None:
    """Collectives and training states exactly, numbers closely, on both doors."""
    for door in PROGRAMS[name].doors:
        told = recorded.differences(name, recorded.read(name), found[name, door])
        if told:
            pytest.fail(f"Through {door}:\n" + "\n".join(told), pytrace=False)


def test_each_file_belongs_to_a_program() -> None:
    """No recording is left that nothing compares."""
    assert {path.stem for path in recorded.FOLDER.glob("*.json")} == set(PROGRAMS)
