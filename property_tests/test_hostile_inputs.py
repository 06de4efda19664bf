"""Laws of reading checkpoints from strangers: a refusal, or what stands there.

Whatever bytes lie at a path, each entry ends with CheckpointError or with values; it
runs nothing, opens nothing outside, and takes neither memory nor time by a number that
the files only claim (``hostile_guard`` says how each is seen).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composable_fsdp.errors import CheckpointError
from property_tests.hostile_guard import (
    Guard,
    read_every_way,
    read_everything,
)
from property_tests.hostile_inputs import (
    CHANGES,
    KINDS,
    Case,
    Files,
    change_names,
    good_checkpoints,
    make_model,
    spoil,
    write,
)
from property_tests.live import LONG
from tests.support.place import _same

CASES = 20_000
"""Cases of the law in the long profile."""


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


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("hostile") / "bench")


def made(name: str) -> Case:
    return "tree", "torch", [("set", 0, 1, ("make", name))]


@pytest.mark.req("X-18", "X-19", "X-20", "X-21", "R-13")
@cases(250)
@given(
    case=st.one_of(
        [
            st.tuples(
                st.just(what),
                st.sampled_from(kinds),
                st.lists(change, min_size=1, max_size=3),
            )
            for what, (kinds, change) in CHANGES.items()
        ]
    )
)
@example(case=("bytes", "native", [("flip", 0, 0, 0)]))
@example(case=("bytes", "torch", [("drop", 0, 2**15, 2**15 + 9)]))
@example(case=("names", "safetensors", [("link", 0, "../../outside")]))
@example(case=("names", "dcp", [("link", 0, "self")]))
@example(case=("json", "weights", [("set", 0, 0, None)]))
@example(case=("json", "safetensors", [("set", -1, 0, "@deep")]))
@example(case=("json", "safetensors", [("set", -1, 1, "\ud800")]))
@example(case=made("endless"))
@example(case=made("itself"))
@example(case=made("expanded square"))
@example(case=made("huge"))
@example(case=("tree", "torch", [("set", 0, 0, ("make", "odd dict"))]))
@example(case=("tree", "torch", [("set", 0, 2, ("make", "names"))]))
def test_changed_files_are_refused_or_read_as_they_stand(
    bench: Bench, case: Case
) -> None:
    """Bytes, names, JSON and pickles under good checksums, and DCP's metadata. Where a
    format has checksums, changed bytes are refused, or read as they were."""
    what, kind, changes = case
    files = dict(bench.good[kind])

    def rename(path: Path) -> None:
        for change in changes:
            change_names(path, change)

    if what == "names":
        bench.read(kind, files, rename)
        return

    spoil(what, files, changes)
    outcomes = bench.read(kind, files)

    if what == "bytes" and kind in ("native", "torch") and outcomes[3] == 0:
        refusal = isinstance(outcomes[0], CheckpointError)
        assert refusal or _same(outcomes[0], bench.values[kind])
