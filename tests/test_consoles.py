"""Commands that pages show print what the pages show.

A ``console`` block has commands after ``$ `` and their output; ``...`` is any text.
Blocks of a page run in order in one folder. A comment before a block may say ``test``
and code that runs first, or ``not run`` and the reason.
"""

from __future__ import annotations

import doctest
import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from composable_fsdp.tools.command_line import main
from tests.support.page_names import prelude_names
from tests.support.scripts import run_script
from tests.support.world import single_rank_group
from tests.test_pages import ROOT, CodeBlock, blocks, pages

COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)
SLOW = re.compile(r"torchrun |--hf ")
"""Commands of more than two seconds, which run with ``--full-matrix`` only."""


def consoles(page: str | Path) -> list[CodeBlock]:
    """Return the console blocks of ``page`` that run."""
    return [
        block
        for block in blocks(ROOT / page)
        if block.language == "console" and not block.note.startswith("not run")
    ]


def commands(block: CodeBlock) -> Iterator[tuple[str, str]]:
    """Yield each command of a block with the output that the page shows."""
    _, *parts = COMMAND.split(block.text)
    yield from zip(parts[::2], parts[1::2], strict=True)


def printed(command: str, folder: Path) -> str:
    """Run a command in ``folder``, the current directory, and return its output."""
    command, _, file = command.partition(" > ")
    words = shlex.split(command)
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        (folder / "output").unlink(missing_ok=True)
        status, text = run_script(
            words[3], *words[4:], ranks=int(words[2]), folder=folder
        )
        assert status == 0, text
        return text
    assert words[:3] == ["python", "-m", "composable_fsdp"], command
    # One stream, as on a terminal, so that messages are part of the output.
    stream = io.StringIO()
    with redirect_stdout(stream), redirect_stderr(stream):
        main(words[3:])
    if file:
        (folder / file).write_text(stream.getvalue())
        return ""
    return stream.getvalue()


def difference(shown: str, found: str) -> str:
    """Return how ``found`` differs from what a page shows; empty if it agrees."""
    # Pages have no spaces at the ends of lines, and not all of the blank lines.
    want, got = (
        "".join(f"{line.rstrip()}\n" for line in text.split("\n") if line.strip())
        for text in (shown, found)
    )
    checker = doctest.OutputChecker()
    if checker.check_output(want, got, doctest.ELLIPSIS):
        return ""
    example = doctest.Example("", want)
    return checker.output_difference(example, got, doctest.REPORT_NDIFF)


def check(page: str | Path, folder: Path, *, slow: bool) -> int:
    """Run the blocks of ``page`` and return the number of commands that ran.

    Without ``slow``, slow blocks are left out with those below that need their files:
    up to the next block with code that runs first.
    """
    for block in blocks(ROOT / page):
        if block.script:
            (folder / block.script).write_text(block.text)
    ran, names, left_out = 0, prelude_names(), False
    for block in consoles(page):
        _, _, code = block.note.partition("\n")
        left_out = bool(SLOW.search(block.text)) or (left_out and not code)
        if code:
            with single_rank_group():
                exec(code, names)
        if left_out and not slow:
            continue
        for command, shown in commands(block):
            found = printed(command, folder)
            told = difference(shown, found)
            assert not told, f"{page}, line {block.line}: {command}\n{told}"
            ran += 1
    return ran


PAGES = [page for page in pages() if consoles(page)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """In the order of the page; slow commands with ``--full-matrix``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # Models of other pages may have modules of the same names.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    slow = bool(request.config.getoption("--full-matrix"))

    ran = check(page, tmp_path, slow=slow)

    total = sum(len(COMMAND.findall(block.text)) for block in consoles(page))
    assert ran == total or not slow


def test_every_command_with_output_is_checked() -> None:
    """A block with commands after ``$`` is a console block, and few do not run."""
    left_out = []
    for page in pages():
        for block in blocks(ROOT / page):
            if block.text.startswith("$ "):
                assert block.language == "console", f"{page}, line {block.line}"
            if block.language == "console" and block.note.startswith("not run"):
                left_out.append(f"{page}: {block.note}")

    assert left_out == []
