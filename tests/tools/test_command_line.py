"""Claims on the command line: exit status, one message, one JSON object, and help."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composable_fsdp import convert
from composable_fsdp.storage.opening import FORMATS
from composable_fsdp.tools import command_line, model_commands
from composable_fsdp.tools.command_line import main
from composable_fsdp.tools.memory import OPTIMIZERS
from tests.storage.samples import sample, saved
from tests.support.scripts import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "run.pt")


def flip(path: Path) -> None:
    """Change one bit of a weight."""
    weight = sample()["model"]["half.weight"]
    data = bytearray(path.read_bytes())
    data[data.index(bytes(weight.view(torch.uint8).flatten().tolist()))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("to", "file"),
    [("native", "rank00000.safetensors"), ("dcp", "__0_0.distcp"), ("torch", "")],
)
def test_verify_finds_one_flipped_bit(
    tmp_path: Path, run: Run, checkpoint: Path, to: Any, file: str
) -> None:
    """Status 1 and one message that names the file, no traceback; JSON says so too."""
    convert(checkpoint, tmp_path / "out", to)
    flip(tmp_path / "out" / file if file else tmp_path / "out")

    status, out, err = run("verify", tmp_path / "out", "--json")

    assert status == 1
    assert err.startswith("error: ")
    assert (file or "out") in err
    assert "Traceback" not in err
    assert json.loads(out) == {"ok": False, "error": err[len("error: ") : -1]}


@pytest.mark.req("U-06")
def test_export_makes_files_of_the_size_that_was_asked_for(
    tmp_path: Path, run: Run, checkpoint: Path
) -> None:
    """Several with an index, or the one file that was named."""
    run("export", checkpoint, tmp_path / "many", "--max-shard-size", "100B")
    status, _, _ = run("export", checkpoint, tmp_path / "one.safetensors")

    assert status == 0
    parts = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(parts) > 1
    found = {name: t for part in parts for name, t in load_file(part).items()}
    assert found.keys() == load_file(tmp_path / "one.safetensors").keys()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("convert", "a", "b", "--to", "zip"),
        ("export", "a", "b", "--max-shard-size", "much"),
        ("diff", "a", "b", "--tolerance", "nan"),
        ("plan", "a", "--world-size", "nan"),
        ("simulate", "a"),
    ],
)
def test_wrong_usage_is_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    """With the usage on standard error."""
    status, out, err = run(*arguments)

    assert (status, out) == (2, "")
    assert err.startswith("usage: python -m composable_fsdp")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(("plna",), "plan"), (("verify", "a", "--weights-olny"), "--weights-only")],
)
def test_a_typing_error_is_told_with_what_was_meant(
    run: Run, arguments: tuple[str, ...], meant: str
) -> None:
    """Commands, and options of the command that was given."""
    status, _, err = run(*arguments)

    assert (status, f"(did you mean {meant}?)" in err) == (2, True)


MODELS = """
import torch
from torch import nn

def exits(): raise SystemExit(3)
def number(): return 5
def layer(): return nn.Linear(8, 8)
"""


@pytest.mark.req("N-10")
@pytest.mark.parametrize(
    ("arguments", "expected", "words"),
    [
        (("plan", "m.py:exits"), 2, "m.py:exits() fails on the meta device"),
        (("plan", "m.py:number"), 2, "expects to return a module"),
        (("plan", "m.py:layer", "--plot", "no/p.png"), 2, "no/p.png: No such file"),
        (("plan", "--hf", "model.json"), 2, "Validation error"),
        (("plan", "m.py:layer", "--batch", "2x3"), 2, "fake tensors"),
        (("inspect", "m.py"), 1, "is no checkpoint"),
        (("inspect", "list.pt"), 1, "holds a list"),
        (("verify", "m.py"), 1, "is no checkpoint"),
        (("convert", "list.pt", "out", "--to", "native"), 1, "holds a list"),
        (("export", "list.pt", "out"), 1, "holds a list"),
        (("diff", "list.pt", "list.pt"), 2, "holds a list"),
    ],
)
def test_what_a_command_cannot_read_is_a_message(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    expected: int,
    words: str,
) -> None:
    """No traceback for wrong input; with ``--json`` the same text is in the object."""
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODELS)
    Path("model.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    torch.save([1], "list.pt")

    status, out, err = run(*arguments, "--json")

    assert status == expected
    assert words in err
    found = json.loads(out)
    assert found["ok"] is False
    assert err == f"error: {found['error']}\n"


@pytest.mark.req("N-10")
def test_the_entry_point_is_the_command_line(run: Run) -> None:
    """What ``pyproject.toml`` names can be called; the overview has all commands."""
    project = (ROOT / "pyproject.toml").read_text()
    (entry,) = re.findall(r'^composable-fsdp = "(.+)"', project, re.MULTILINE)
    module, name = entry.split(":")

    assert getattr(importlib.import_module(module), name) is main
    _, out, _ = run("--help")
    for command in ("plan", "verify", "inspect", "diff", "convert", "export"):
        assert re.search(rf"^    {command} ", out, re.MULTILINE)


@pytest.mark.parametrize("start", [["-m", "composable_fsdp"], ["composable-fsdp"]])
def test_help_does_not_wait_for_torch_and_commands_get_what_they_need(
    tmp_path: Path, start: list[str]
) -> None:
    """A module and a console script; a step needs what ``import`` registers."""
    (tmp_path / "composable-fsdp").write_text(
        "import sys\nfrom composable_fsdp.__main__ import main\nsys.exit(main())\n"
    )
    (tmp_path / "m.py").write_text(MODELS)

    def lines(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.fspath(ROOT),
                "PYTHONPROFILEIMPORTTIME": "1",
            },
            capture_output=True,
            check=True,
            text=True,
        )
        return done.stdout + done.stderr

    for wanted in (["--help"], ["--version"], ["plan", "--help"]):
        assert not re.search(r"\| +torch$", lines(*wanted), re.MULTILINE)
    found = lines("plan", "m.py:layer", "--batch", "2x8", "--world-size", "2")
    assert "1 reduce-scatter" in found
    assert re.search(r"features\.guard\.watch$", found, re.MULTILINE)


def test_the_parser_knows_the_words_of_the_package() -> None:
    """It lists them itself, because their modules import torch."""
    assert set(command_line.STRATEGIES) == model_commands.STRATEGIES.keys()
    assert set(command_line.OPTIMIZERS) == OPTIMIZERS.keys()
    assert command_line.FORMATS == FORMATS


def test_an_interrupt_leaves_nothing(
    tmp_path: Path, run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle: one line, the shell's status, no file."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    status, _, err = run("convert", checkpoint, tmp_path / "out", "--to", "torch")

    assert (status, err) == (130, "interrupted; nothing was left behind\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
