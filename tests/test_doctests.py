"""Every example of the package and of the documentation runs and prints what it says.

Examples may use the names of `namespace` below: a small sharded model after a step on
one rank, its optimizer, and a checkpoint in the working directory.
"""

from __future__ import annotations

import doctest
import importlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import composable_fsdp
from composable_fsdp import ModuleWrapPolicy, fully_shard, save
from tests.support.world import World

PACKAGE = Path(composable_fsdp.__file__).parent
ROOT = PACKAGE.parent
DOORS = ("doors.fsdp2", "entries.fully_shard", "entries.replicate")
"""Modules whose examples shard the model themselves."""
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.attn(x))


class _Model(nn.Module):
    """The names that examples use: ``body`` before ``head``, ``blocks`` in ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(4, 4)

    def body(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x)))

    def generate(self, x: Tensor) -> Tensor:
        """Call the model as users of ``register_forward_method`` do."""
        return cast(Tensor, self(x))


def namespace(module: str) -> dict[str, Any]:
    """Return the names that examples of ``module`` may use beside its own."""
    model = _Model()
    x = torch.ones(2, 4)
    names: dict[str, Any] = {"nn": nn, "torch": torch, "AdamW": torch.optim.AdamW}
    names.update({n: getattr(composable_fsdp, n) for n in composable_fsdp.__all__})
    names.update(model=model, x=x, first_half=x, second_half=x, loader=[x, x])
    if module.endswith(DOORS):
        return names

    fully_shard(model, policy=ModuleWrapPolicy({_Block, nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    save("runs/step-100", model, optimizer)
    torch.save(_Model().state_dict(), "step_100.pt")
    names.update(optim=optimizer, optimizer=optimizer, blocks=list(model.blocks))
    names.update(loss_of=lambda x: model(x).sum(), loss=model(x).sum())
    return names


@cache
def modules() -> list[str]:
    """Return the modules of the package whose source has an example."""
    found = [path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text()]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in sorted(found)]
    return [".".join(part) for part in parts]


def pages() -> list[Path]:
    """Return the documentation pages with an example."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return [page for page in found if ">>> " in page.read_text()]


class _Checker(doctest.OutputChecker):
    """Takes any output where an example gives none: many return an object."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def failures(test: doctest.DocTest, names: dict[str, Any]) -> str:
    """Run ``test`` with ``names`` added; returns the report of what failed."""
    test.globs.update({k: v for k, v in names.items() if k not in test.globs})
    report = io.StringIO()
    runner = doctest.DocTestRunner(_Checker(), verbose=False, optionflags=OPTIONS)
    runner.run(test, out=report.write)
    return report.getvalue()


@pytest.mark.parametrize("name", modules())
def test_examples_of_the_package_do_what_they_say(
    one_rank: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No example of the module fails, and none is skipped."""
    module = importlib.import_module(name)
    tests = [t for t in doctest.DocTestFinder().find(module, name) if t.examples]

    told = ""
    for i, test in enumerate(tests):
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        told += failures(test, namespace(name))

    assert not told, told
    assert tests, f"no example found in {name}, though its source has '>>> '"
    assert not any(
        doctest.SKIP in each.options for test in tests for each in test.examples
    )


def test_examples_of_the_pages_do_what_they_say(
    one_rank: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for README.md and docs, where examples are written as at a prompt."""
    parser = doctest.DocTestParser()

    for i, page in enumerate(pages()):
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        # The end of a fenced block would count as the output of its last line.
        text = re.sub("^```.*$", "", page.read_text(), flags=re.MULTILINE)
        test = parser.get_doctest(text, {}, page.name, str(page), 0)
        told = failures(test, namespace(page.stem))
        assert not told, told
