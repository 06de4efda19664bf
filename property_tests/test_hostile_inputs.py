"""Laws of reading checkpoints from strangers: a refusal, or what stands there.

Whatever bytes lie at a path, each entry ends with CheckpointError or with values; it
runs nothing, opens nothing outside, and takes neither memory nor time by a number that
the files only claim (``Guard`` says how each is seen).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import load, verify
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.convert import check_readable, convert
from composable_fsdp.storage.opening import open_source
from composable_fsdp.tools.command_line import main
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
from tests.storage.samples import everything
from tests.support.place import _same

SECONDS = 5.0
"""The longest time of this process's own that a checkpoint of some kilobytes takes."""
MEMORY = 2**29
"""Bytes that a reader may add; the files have some kilobytes."""
STARTS = ("subprocess.", "os.system", "os.exec", "os.fork", "os.spawn", "socket.")
"""Audit events of what a payload might do."""
FILE_EVENTS = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
)
"""Audit events that change files; ``open`` is looked at beside them."""


class Broken(AssertionError):
    """A reader did what no checkpoint may make a reader do."""


class Guard:
    """Watches this process while ``watching``; there is one, as no hook can be removed.

    ``broken`` collects what a reader did, because readers turn errors of an audit hook
    into CheckpointError.
    """

    def __init__(self) -> None:
        self.roots: tuple[str, ...] = ()
        # Modules of Python and torch are imported late; a load asks how much memory is
        # free (``storage.staging``).
        places = [sys.prefix, sys.base_prefix, "/proc/meminfo", "/sys/fs/cgroup"]
        places += sys.path
        self.own = [os.path.realpath(place) for place in places if place]
        self.broken: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.roots:
            return
        if event.startswith(STARTS):
            self.broken.append(f"{event} {arguments!r}"[:200])
        elif event == "open":
            path, _, flags = arguments
            self._look(event, path, follow=not flags & os.O_NOFOLLOW)
        elif event in FILE_EVENTS:
            self._look(event, arguments[0], follow=False)

    def _look(self, event: str, path: Any, *, follow: bool) -> None:
        # ``rmtree`` names what it removes relative to an open folder.
        if not isinstance(path, str | bytes | os.PathLike) or not os.path.isabs(path):
            return
        roots, self.roots = self.roots, ()  # ``realpath`` may raise events, too
        folder, name = os.path.split(os.fsdecode(path))
        real = os.path.join(os.path.realpath(folder), name)
        real = os.path.realpath(real) if follow else real
        if not (real + os.sep).startswith((*roots, *self.own)):
            self.broken.append(f"{event} {real}"[:200])
        self.roots = roots

    @contextlib.contextmanager
    def watching(self, *roots: Path) -> Iterator[None]:
        """Watch what runs inside, which may only touch ``roots``."""
        self.broken = []
        with open("/proc/self/statm") as pages:
            size = int(pages.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        randomness = torch.get_rng_state(), random.getstate()
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
        self.roots = tuple(os.path.realpath(root) + os.sep for root in roots)
        try:
            yield
        finally:
            self.roots = ()
            resource.setrlimit(resource.RLIMIT_AS, before)
            torch.set_rng_state(randomness[0])
            random.setstate(randomness[1])
        spent = time.process_time() - began
        if self.broken or spent > SECONDS:
            raise Broken(f"{self.broken[:3]}, {spent:.1f} s")


def refused(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or its CheckpointError; any other error goes on.

    Raises: Broken, for an error that hides one of memory, or of a size that has no end.
    """
    try:
        return call()
    except CheckpointError as error:
        require_bounded(error)
        return error


def require_bounded(error: BaseException) -> None:
    """Raise Broken if ``error`` is long, or comes from memory that was not there."""
    if len(str(error)) > 20_000:
        raise Broken(f"a message of {len(str(error))} characters")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            raise Broken(f"memory by a claimed size: {cause}"[:200])
        cause = cause.__cause__ or cause.__context__


def command(*arguments: str) -> int:
    """Run the command line as a script with an ASCII terminal does."""
    with (
        contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "ascii")),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return main(list(arguments))


def read_everything(path: Path) -> dict[str, Any]:
    """All that the checkpoint holds, read as ``verify`` of the command line reads."""
    with open_source(path) as source:
        check_readable(source)
        source.rng(0, 1)
        return {**everything(source), "own": dict(source.own_states)}


def read_every_way(
    guard: Guard,
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: Any,
) -> list[Any]:
    """Read ``path`` through all entries, in a guard."""
    folder = path if path.name.startswith("case") else path.parent
    made = folder / "made"
    before = {each.name for each in folder.iterdir()}
    with guard.watching(folder):
        outcomes = [
            refused(lambda: read_everything(path)),
            refused(lambda: load(path, model, optimizer)),
            refused(lambda: convert(path, made, to)),
            command("verify", str(path)),
        ]
        verify(path)
    assert made.exists() is not isinstance(outcomes[2], CheckpointError)
    assert outcomes[3] in (0, 1)
    assert {each.name for each in folder.iterdir()} <= before | {made.name}
    return outcomes


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
