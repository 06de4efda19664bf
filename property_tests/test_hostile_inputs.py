"""Laws of reading checkpoints from strangers: a refusal, or what stands there.

Whatever bytes lie at a path, each entry ends with CheckpointError or with values; it
runs nothing, opens nothing outside, and takes neither memory nor time by a number that
the files only claim (``hostile_guard`` says how each is seen).
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composable_fsdp import CheckpointError
from property_tests.hostile_guard import (
    Broken,
    Guard,
    read_every_way,
    read_everything,
    refused,
)
from property_tests.hostile_inputs import (
    BYTES,
    FIELDS,
    JSON,
    KINDS,
    NAMES,
    RECORDS,
    TREES,
    Change,
    Files,
    change_bytes,
    change_json,
    change_metadata,
    change_names,
    change_records,
    change_torch,
    good_checkpoints,
    make_model,
    write,
)
from property_tests.live import LONG
from tests.storage.samples import same

CASES = 4000
"""Cases of each of the five laws in the long profile."""


def cases(everyday: int) -> settings:
    """``everyday`` cases in the everyday profile, and ``CASES`` in the long one."""
    profile = settings.default
    assert profile is not None
    asked = profile.max_examples
    return settings(
        max_examples=CASES if asked == LONG else max(1, everyday * asked // 50)
    )


class Bench:
    """Good checkpoints in memory, and a new folder for each case."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.guard = folder, Guard()
        folder.mkdir()
        self.good = good_checkpoints(folder / "good")
        self.outside = folder / "outside"
        shutil.copytree(folder / "good" / "native", self.outside)
        self.model, self.optimizer = make_model()
        self.counter = itertools.count()
        self.values: dict[str, Any] = {}
        for kind in KINDS:
            path = write(self.good[kind], kind, folder / f"first-{kind}")
            self.values[kind] = read_everything(path)
            self.read(kind, dict(self.good[kind]))

    def read(
        self, kind: str, files: Files, change: Callable[[Path], object] | None = None
    ) -> list[Any]:
        """Write ``files``, change the names, and read every way; see there."""
        number = next(self.counter)
        folder = self.folder / f"case-{number}"
        try:
            path = write(files, kind, folder)
            if change is not None:
                change(path)
            to = ("torch", "native", "safetensors", "dcp")[number % 4]
            model, optimizer = self.model, self.optimizer
            return read_every_way(self.guard, path, model, optimizer, to)
        finally:
            shutil.rmtree(folder)

    def require_equal(self, kind: str, outcomes: list[Any]) -> None:
        """What was read is what was written, if the command line finds it good."""
        if outcomes[3] == 0 and not isinstance(outcomes[0], CheckpointError):
            assert same(outcomes[0], self.values[kind])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("hostile") / "bench")


Case = tuple[str, list[Change]]


def spoilt(kinds: tuple[str, ...], change: st.SearchStrategy[Change]) -> Any:
    """Draw a kind of checkpoint, and one to three changes."""
    return st.tuples(st.sampled_from(kinds), st.lists(change, min_size=1, max_size=3))


@pytest.mark.req("X-18", "X-19", "X-20")
@cases(50)
@given(case=spoilt(KINDS, BYTES))
@example(case=("native", [("flip", 0, 0, 0)]))
@example(case=("torch", [("drop", 0, 2**15, 2**15 + 9)]))
def test_changed_bytes_are_refused_or_read_as_they_were(
    bench: Bench, case: Case
) -> None:
    """As they were, by the formats that have checksums."""
    kind, changes = case
    files = dict(bench.good[kind])
    for change in changes:
        change_bytes(files, change)

    outcomes = bench.read(kind, files)

    if kind in ("native", "torch"):
        bench.require_equal(kind, outcomes)


@pytest.mark.req("X-18", "X-21")
@cases(50)
@given(case=spoilt(KINDS, NAMES))
@example(case=("safetensors", [("link", 0, "../../outside")]))
@example(case=("dcp", [("link", 0, "self")]))
def test_changed_names_lead_nowhere_else(bench: Bench, case: Case) -> None:
    """Files that are missing, renamed, links, pipes or directories."""
    kind, changes = case

    def change(path: Path) -> None:
        for each in changes:
            change_names(path, each)

    bench.read(kind, dict(bench.good[kind]), change)


@pytest.mark.req("X-20", "X-21")
@cases(50)
@given(case=spoilt(("native", "safetensors", "weights"), JSON))
@example(case=("weights", [("set", 0, 0, None)]))
@example(case=("safetensors", [("set", -1, 0, "@deep")]))
@example(case=("safetensors", [("set", -1, 1, "\ud800")]))
def test_changed_json_is_refused_or_read_as_it_stands(bench: Bench, case: Case) -> None:
    """A manifest, an index or a header whose checksum is that of the change."""
    kind, changes = case
    files = dict(bench.good[kind])
    for change in changes:
        change_json(files, change)

    bench.read(kind, files)


@pytest.mark.req("X-21")
@cases(50)
@given(changes=st.lists(st.one_of(TREES, RECORDS), min_size=1, max_size=3))
@example(changes=[("set", 0, 1, ("make", "endless"))])
@example(changes=[("set", 0, 1, ("make", "itself"))])
@example(changes=[("set", 0, 1, ("make", "expanded square"))])
@example(changes=[("set", 0, 1, ("make", "huge"))])
@example(changes=[("set", 0, 0, ("make", "odd dict"))])
@example(changes=[("set", 0, 2, ("make", "names"))])
def test_a_changed_torch_file_is_refused_or_read_as_it_stands(
    bench: Bench, changes: list[Change]
) -> None:
    """The values in it, or the bytes of its pickle, under a good checksum."""
    files = dict(bench.good["torch"])
    change_torch(files, [each for each in changes if each[0] != "record"])
    for change in changes:
        if change[0] == "record":
            change_records(files, change)

    bench.read("torch", files)


@pytest.mark.req("X-21")
@cases(50)
@given(changes=st.lists(FIELDS, min_size=1, max_size=3))
def test_changed_dcp_metadata_is_refused_or_read_as_it_stands(
    bench: Bench, changes: list[Change]
) -> None:
    """Any field, key or item of it."""
    files = dict(bench.good["dcp"])
    change_metadata(files, changes)

    bench.read("dcp", files)


@pytest.mark.parametrize("number", range(3))
def test_the_guard_sees_what_it_is_for(bench: Bench, number: int) -> None:
    """A process started, a file outside, and memory that was not there."""
    calls: list[Callable[[], object]] = [
        lambda: os.system("true"),
        lambda: (bench.outside / "manifest.json").read_bytes(),
        lambda: refused(lambda: hide(lambda: torch.empty(2**40))),
    ]

    with pytest.raises(Broken), bench.guard.watching(bench.folder / "none"):
        calls[number]()


def hide(call: Callable[[], object]) -> None:
    """Do as a reader that turns all errors into its own."""
    try:
        call()
    except Exception as error:
        raise CheckpointError("damaged") from error
