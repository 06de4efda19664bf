"""Every code block of README.md and of the documentation runs.

A ``python`` block whose first line is a comment with its command is a script, which
runs by it with the blocks below. Other blocks run in this process, in order, with the
names that ``how_to/index.md`` describes. A comment before a block may say ``test``
and code that runs first, or ``not run`` and the reason.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from tests import stages
from tests.support.page_names import page_names, prelude_names
from tests.support.scripts import run_script
from tests.support.world import single_rank_group

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    # No part of a note ends a comment, so a note does not reach over other blocks.
    r"^(?:<!-- (?P<note>(?:(?!-->).)*?)(?: |\n)-->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SCRIPT = re.compile(r"# (?P<command>(?:torchrun .* |python )(?P<name>\w+\.py))\n")
ELSEWHERE = {
    "docs/how_to/torchao.md": "tests/integrations_env/test_torchao.py runs the blocks",
    "docs/hugging_face.md": "tests/integrations_env/test_hf_page.py runs the blocks",
    "docs/lightning.md": "tests/integrations_env/test_lightning_page.py runs it",
}


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    note: str
    text: str

    @property
    def script(self) -> str | None:
        """The name of the file, if the block is a whole script."""
        found = SCRIPT.match(self.text)
        return found["name"] if found and self.language == "python" else None

    def run(self, names: dict[str, object]) -> None:
        """Run the fragment; errors show the line of the page."""
        first = self.note.removeprefix("test\n") if self.note[:4] == "test" else ""
        hidden = prelude_names() | names
        exec(first, hidden)
        # What the prelude imports stays hidden: the page has to show its imports.
        nodes = list(ast.walk(ast.parse(first)))
        made = {node.id for node in nodes if isinstance(node, ast.Name)}
        made |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        kept = made & hidden.keys() - prelude_names().keys()
        names.update({name: hidden[name] for name in kept})
        text = "\n" * self.line + self.text
        exec(compile(text, str(self.page), "exec"), names)


def blocks(page: Path) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of ``page``."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text"))
        note = found["note"] or ""
        yield CodeBlock(page, line, found["language"], note, found["text"])


def pages() -> list[str]:
    """Return the pages, as paths from the root of the repository."""
    found = [ROOT / "README.md", ROOT / "examples" / "README.md"]
    found += sorted((ROOT / "docs").rglob("*.md"))
    return [str(p.relative_to(ROOT)) for p in found if "_build" not in p.parts]


def shown_code(page: str) -> list[CodeBlock]:
    """Return the Python blocks of ``page`` that run."""
    return [
        block
        for block in blocks(ROOT / page)
        if block.language == "python"
        and ">>> " not in block.text
        and not block.note.startswith("not run")
    ]


def fragments(page: str) -> list[CodeBlock]:
    """Return the Python blocks of ``page`` above its script."""
    return list(takewhile(lambda block: not block.script, shown_code(page)))


def scripts(page: str) -> list[list[CodeBlock]]:
    """Return the scripts of ``page``, each with the blocks that go on in it."""
    found: list[list[CodeBlock]] = []
    for block in shown_code(page)[len(fragments(page)) :]:
        if block.script:
            found.append([])
        found[-1].append(block)
    return found


PAGES = [page for page in pages() if page not in ELSEWHERE and fragments(page)]
LAST = "README.md"  # runs every day, the others with --full-matrix
SCRIPTS = [page for page in pages() if page != LAST and scripts(page)]


@pytest.mark.req("N-08")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block runs after those above it, with the names that all pages share."""
    monkeypatch.chdir(tmp_path)

    with single_rank_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = page_names()
        for block in fragments(page):
            block.run(names)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.req("N-08")
@pytest.mark.parametrize("page", [*SCRIPTS, LAST])
def test_a_script_of_a_page_runs_by_its_command(
    page: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In fresh processes, with nothing that the page does not show.

    Every day in processes that have imported torch: three that import it take longer
    than all other pages. ``make docs`` runs the commands as they stand.
    """
    for found in scripts(page):
        command = SCRIPT.match(found[0].text)["command"]  # type: ignore[index]
        (tmp_path / str(found[0].script)).write_text("\n".join(b.text for b in found))
        if request.config.getoption("--full-matrix"):
            status, output = run_command(command, tmp_path)
        else:
            *launch, script = command.split()
            ranks = int(launch[-1]) if launch[0] == "torchrun" else 1
            status, output = run_script(script, ranks=ranks, folder=tmp_path)

        assert status == 0, output


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """Run ``command`` of a page in ``folder``; return its status and its output."""
    torchrun = "-m torch.distributed.run --standalone"
    words = command.replace("torchrun", torchrun).removeprefix("python ").split()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_block_that_needs_nothing_of_its_page_is_a_script() -> None:
    """It imports torch and uses none of the names that pages share."""
    shared = page_names(alone=True).keys() | {"model", "optimizer", "optim"}
    unnamed = [
        f"{page}, line {block.line}"
        for page in PAGES
        for block in fragments(page)[:1]
        if "import torch\n" in block.text
        if not shared & set(re.findall(r"\w+", block.text))
    ]

    assert unnamed == []


def test_few_blocks_do_not_run() -> None:
    """Only blocks that need what a test machine does not have."""
    left_out = [b.note for page in pages() for b in blocks(ROOT / page)]
    reasons = [note for note in left_out if note.startswith("not run")]

    assert sorted(reasons) == [
        "not run: needs DeepSpeed",
        "not run: needs Megatron-FSDP",
        "not run: needs a GPU",
    ]


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.req("N-08")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Its code cells, in order; stored notebooks have no outputs."""
    cells = [
        c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"
    ]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    (tmp_path / "cells.py").write_text(text)

    status, output = run_script("cells.py", ranks=1, folder=tmp_path)

    assert status == 0, output
    assert not any(cell["outputs"] for cell in cells)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A folder with new pictures."""
    pytest.importorskip("matplotlib")
    names: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "draw.py"))
    names["block"].__globals__["FOLDER"] = tmp_path
    for name in ("block", "layout", "step", "memory", "checkpoint", "host"):
        names[name]()
    return tmp_path


def test_the_pictures_are_up_to_date(drawn: Path) -> None:
    """The memory of a step is simulated anew, and equals the picture."""
    stored = ROOT / "docs" / "_static"
    for path in sorted(drawn.glob("*.svg")):
        assert path.read_text() == (stored / path.name).read_text(), path.name
    assert len(list(drawn.glob("*.svg"))) == 6


def test_the_page_of_stages_shows_each_stage_as_it_is() -> None:
    """``python -m tests.stages`` prints the table anew."""
    page = ROOT / "docs" / "development" / "stages.md"

    assert stages.table() in page.read_text()
