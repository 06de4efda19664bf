"""Every code block of README.md and of the documentation runs.

A ``python`` block is a fragment, which runs in this process on one rank, after the
blocks above it on its page; or a script, whose first line is a comment with its name.
A comment before a block, which readers do not see, may say ``test`` and code that runs
first, ``alone`` (no process group), or ``not run`` and the reason.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.page_names import page_names
from tests.support.world import single_rank_group

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    # No part of a note ends a comment, so a note does not reach over other blocks.
    r"^(?:<!-- (?P<note>(?:(?!-->).)*?)(?: |\n)-->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SCRIPT = re.compile(r"# (?:torchrun .* )?(\w+\.py)\n")
ELSEWHERE = {
    "docs/how_to/torchao.md": "tests/integrations_env/test_torchao.py runs the blocks",
    "docs/hugging_face.md": "tests/integrations_env/test_hf_page.py runs the blocks",
    "docs/lightning.md": "tests/integrations_env/test_lightning_page.py runs it",
    "docs/migrate/fsdp2.md": "tests/entries/test_fsdp2.py runs its script",
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
        return found[1] if found and self.language == "python" else None

    def run(self, names: dict[str, object]) -> None:
        """Run the fragment; errors show the line of the page."""
        first = self.note.removeprefix("test\n") if self.note[:4] == "test" else ""
        exec(first, names)
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


def fragments(page: str) -> list[CodeBlock]:
    """Return the Python blocks of ``page`` that are no script."""
    return [
        block
        for block in blocks(ROOT / page)
        if block.language == "python"
        and not block.script
        and ">>> " not in block.text
        and not block.note.startswith("not run")
    ]


PAGES = [page for page in pages() if page not in ELSEWHERE and fragments(page)]


@pytest.mark.req("N-08")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block runs after those above it, with the names that all pages share."""
    monkeypatch.chdir(tmp_path)
    found = fragments(page)

    alone = page_names(alone=True)
    for block in found:
        if block.note == "alone":
            block.run(alone)
    with single_rank_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = page_names()
        for block in found:
            if block.note != "alone":
                block.run(names)


def test_few_blocks_do_not_run() -> None:
    """Only blocks that need what a test machine does not have."""
    left_out = [b.note for page in pages() for b in blocks(ROOT / page)]
    reasons = [note for note in left_out if note.startswith("not run")]

    assert sorted(reasons) == [
        "not run: needs DeepSpeed",
        "not run: needs Megatron-FSDP",
        "not run: needs a GPU",
    ]
