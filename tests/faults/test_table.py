"""The messages in ``docs/development/faults.md`` are real, for both packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.launch import launch
from tests.support.short_waits import shorten_waits

PAGE = (Path(__file__).parents[2] / "docs" / "development" / "faults.md").read_text()


def errors_in(text: str) -> str:
    """The last error of this package that a rank printed, or its warning."""
    found = re.findall(r"^composable_fsdp\.errors\.(.*)$", text, re.MULTILINE)
    return str(found[-1]) if found else text


@pytest.mark.req("X-09", "X-10")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "other-order",
            "parameter 1 of unit 'blocks.1': 'blocks.1.0.inner.weight' on rank 0, "
            "'blocks.1.0.outer.weight' on rank 1",
        ),
        (
            "other-split",
            "parameter 1 of unit 'blocks.1' (rank 1 without a parameter "
            "'blocks.1.0.inner.weight'",
        ),
    ],
)
def test_models_that_differ_are_told_in_the_words_of_the_page(
    tmp_path: Path, fault: str, message: str
) -> None:
    """Both ranks end before the first step, with the message that the page has."""
    ended = launch(fault, ranks=2, folder=tmp_path)

    assert message in PAGE
    for each in ended:
        assert each.status == 1
        assert message in errors_in(each.output), each.output
        assert "step 1" not in each.output


@pytest.mark.req("X-13")
def test_weights_that_differ_are_a_warning_on_each_rank(tmp_path: Path) -> None:
    """Training goes on, as the page says."""
    message = (
        "Ranks have sharded different weights: parameter 'blocks.0.0.inner.weight' has "
        "other values on rank 0 than on rank 1"
    )

    ended = launch("other-weights", ranks=2, folder=tmp_path)

    assert message in PAGE
    assert all(each.status == 0 and message in each.output for each in ended)


@pytest.mark.req("X-12")
def test_a_backward_that_one_rank_leaves_out_is_named(tmp_path: Path) -> None:
    """The rank that goes on to its next forward is told who waits, and where."""
    message = "where the order of earlier rounds has a backward of Blocks"

    first, last = launch(
        *("no-backward", "--timeout", "40"),
        ranks=2,
        folder=tmp_path,
        before=shorten_waits,
    )

    assert message in PAGE
    assert (first.status, last.status) == (1, 1)
    assert message in errors_in(last.output), last.output
    assert message in errors_in(first.output), first.output


def test_fsdp2_is_silent_where_the_page_says_so(tmp_path: Path) -> None:
    """All steps end with status 0, and the numbers are others than without the fault.

    If this fails with a newer torch, the page is to be measured anew.
    """
    printed = {}
    for name in ("none", "swap", "other-order"):
        (folder := tmp_path / name).mkdir()
        ended = launch(name, "--library", "torch", ranks=2, folder=folder)
        assert [each.status for each in ended] == [0, 0]
        printed[name] = [each.output for each in ended]

    right = printed.pop("none")
    for name, found in printed.items():
        assert found != right, name
        assert all("step 4" in output for output in found), name
