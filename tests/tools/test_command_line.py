"""The command line: exit status, one message, one JSON object; what it shows."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from composable_fsdp import (
    convert,
    describe,
    fully_shard,
    load,
    save,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage import export_safetensors
from composable_fsdp.storage.opening import FORMATS
from composable_fsdp.tools import command_line, model_commands
from composable_fsdp.tools.command_line import main
from composable_fsdp.tools.memory import OPTIMIZERS
from tests.storage.samples import sample, saved
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.scripts import Run
from tests.support.world import World, fake_world

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


def small() -> nn.Sequential:
    """A list of two layers as one unit, a frozen bias, and a buffer."""
    last = nn.Linear(4, 5)
    last.bias.requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), last)
    model.register_buffer("mask", torch.ones(3))
    fully_shard([model[0], model[1]])
    return fully_shard(model)


TEXT = """\
Sequential: 2 units, 65 parameters, 1 other tensor
(root) Sequential, sharded over 4 ranks, 48 B per rank, FULL_SHARD, cpu
  float32, 20 elements, 8 per rank, 12 of padding
    2.weight  (5, 4)  rank 0: rows 0-1 | rank 1: rows 2-3 | rank 2: row 4
  float32 frozen, 5 elements, 4 per rank, 11 of padding
    2.bias    (5,)    rank 0: elements 0-3 | rank 1: element 4
0 Linear, sharded over 4 ranks, 48 B per rank, FULL_SHARD, cpu
  float32, 40 elements, 12 per rank, 8 of padding
    0.weight  (4, 4)  rank 0: rows 0-2 | rank 1: row 3
    1.weight  (4, 4)  rank 1: rows 0-1 | rank 2: rows 2-3
    0.bias    (4,)    rank 2: whole
    1.bias    (4,)    rank 3: whole
in no unit, whole on every rank
  mask  buffer float32 (3,)"""


@pytest.mark.req("N-11", "U-09")
def test_the_text_names_the_rows_of_each_rank() -> None:
    """Padding, frozen parameters, lists of modules and buffers included."""
    with fake_world(4):
        assert str(describe(small())) == TEXT


@pytest.mark.req("N-11")
@on_ranks(2)
def test_a_checkpoint_shows_the_shards_that_were_saved(
    world: World, tmp_path: Path
) -> None:
    """The parts of the model that saved it; other formats have whole tensors."""
    model = TinyGPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(model(torch.zeros(1, 4, dtype=torch.long)).sum())
    optimizer.step()
    save(tmp_path / "run", model, optimizer)

    live, saved = describe(model).as_dict(), describe(tmp_path / "run").as_dict()

    expected = {
        parameter["names"][0]: parameter["shards"]
        for unit in live["units"]
        for region in unit["regions"]
        for parameter in region["parameters"]
    }
    assert {each["name"]: each["parts"] for each in saved["tensors"]} == expected
    assert saved["optimizer"]["states"] == ["exp_avg", "exp_avg_sq"]
    if world.rank == 0:
        convert(tmp_path / "run", tmp_path / "run.pt", "torch")
        other = describe(tmp_path / "run.pt")
        assert other.units == ()
        assert "blocks.0" in str(other)
    load(tmp_path / "run", model, optimizer)


@pytest.mark.req("N-11")
def test_the_command_prints_text_and_json(
    one_rank: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All tensors, in both."""
    model = TinyGPT(layers=3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    save(tmp_path / "run", model)

    assert main(["inspect", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    names = [name for name, _ in model.named_parameters()]
    assert sorted(each["name"] for each in found["tensors"]) == sorted(names)
    assert all(name in text for name in names)
    assert main(["inspect", str(tmp_path / "none")]) == 1


@pytest.mark.req("K-10", "R-13")
@pytest.mark.parametrize("command", ["inspect", "diff", "verify"])
def test_names_of_a_file_are_printed_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A checkpoint of a stranger cannot clear the screen or forge a line."""
    name = "a\x1b[2J\nforged \x9b31m"
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for number, path in enumerate(paths):
        torch.save({"model": {name: torch.full((2,), float(number))}}, path)

    main([command, str(paths[0]), *([str(paths[1])] if command == "diff" else [])])
    torch.save({"model": {name: "no tensor"}}, paths[0])
    main(["inspect", str(paths[0])])

    out = "".join(capsys.readouterr())
    assert command == "verify" or r"a\x1b[2J\nforged \x9b31m" in out
    assert all(each.isprintable() or each == "\n" for each in out)
    assert not any(line.startswith("forged") for line in out.splitlines())


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The sample with a change, in a ``torch.save`` file."""
    made = sample()
    change(made)
    torch.save(made, path)
    return path


@pytest.mark.req("N-10")
@pytest.mark.parametrize("to", ["native", "dcp", "torch"])
def test_a_checkpoint_equals_itself_in_another_format(
    tmp_path: Path, run: Run, to: Any
) -> None:
    """Ties, scalars, empty tensors and all other parts included."""
    source = saved(tmp_path / "run.pt")
    convert(source, tmp_path / "other", to)

    status, out, err = run("diff", source, tmp_path / "other")

    assert (status, err) == (0, "")
    assert out.splitlines()[0].endswith("are equal")
    assert "8 tensors in both, 0 differ" in out


@pytest.mark.req("N-10")
def test_what_differs_is_named_with_the_largest_difference(
    tmp_path: Path, run: Run
) -> None:
    """Names, shapes, dtypes, values, and parts that are no tensors; status 1."""

    def change(made: dict[str, Any]) -> None:
        model = made["model"]
        model["half.weight"] = model["half.weight"].float()
        model["across.weight"] = torch.zeros(2, 2)
        model["mask"][1] = True
        model["scale"] = model["scale"] + 0.5
        model["new"] = model.pop("norm.num_batches_tracked")
        made["extra"]["epoch"] = 4

    other = changed(tmp_path / "other.pt", change)

    status, out, _ = run("diff", saved(tmp_path / "run.pt"), other, "--json")
    _, text, _ = run("diff", tmp_path / "run.pt", other)

    found = json.loads(out)
    assert (status, found["ok"], found["equal"]) == (1, True, False)
    model = found["model"]
    assert model["only_first"] == ["norm.num_batches_tracked"]
    assert model["only_second"] == ["new"]
    assert model["different"] == {
        "half.weight": {"dtypes": ["bfloat16", "float32"]},
        "across.weight": {"shapes": [[6, 4], [2, 2]]},
        "mask": {"elements": 1, "of": 3, "max_difference": 1.0},
        "scale": {"elements": 1, "of": 1, "max_difference": 0.5},
    }
    assert found["others"] == ["extra state"]
    assert "half.weight: dtypes bfloat16 and float32" in text
    assert "scale: elements 1, of 1, max_difference 0.5" in text


def test_nan_equals_nan_and_a_tolerance_is_taken(tmp_path: Path, run: Run) -> None:
    """A value that became NaN differs; weights alone may be compared."""
    nan = changed(tmp_path / "nan.pt", lambda m: m["model"]["scale"].fill_(torch.nan))
    same = changed(tmp_path / "same.pt", lambda m: m["model"]["scale"].fill_(torch.nan))
    near = changed(tmp_path / "near.pt", lambda m: m["model"]["scale"].add_(1e-3))
    plain = saved(tmp_path / "run.pt")

    assert run("diff", nan, same)[0] == 0
    status, out, _ = run("diff", plain, nan, "--json")
    found = json.loads(out)["model"]["different"]["scale"]
    assert (status, found["max_difference"]) == (1, "nan")
    assert run("diff", nan, plain)[0] == 1
    assert run("diff", plain, near, "--tolerance", "1e-4")[0] == 1
    assert run("diff", plain, near, "--tolerance", "1e-2")[0] == 0
    optim = changed(tmp_path / "optim.pt", lambda m: m["optim"]["state"].clear())
    assert run("diff", plain, optim)[0] == 1
    assert run("diff", plain, optim, "--weights-only")[0] == 0


def test_whole_numbers_are_compared_as_whole_numbers(tmp_path: Path, run: Run) -> None:
    """As float64, these two would be equal."""
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for more, path in enumerate(paths):
        torch.save({"model": {"count": torch.tensor([2**60 + more])}}, path)

    assert run("diff", *paths)[0] == 1
    assert run("diff", *paths, "--tolerance", "1")[0] == 0


@pytest.mark.req("U-06")
@on_ranks(2)
def test_a_sharded_model_is_exported_in_another_dtype(
    world: World, tmp_path: Path
) -> None:
    """A value that the dtype cannot hold is refused by name, on all ranks."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.BatchNorm1d(4))
    expected = layer.weight.detach().half()
    fully_shard(model)
    export_safetensors(tmp_path / "half", model, dtype=torch.float16)
    found = load_file(tmp_path / "half" / "model.safetensors")
    with torch.no_grad():
        layer.weight.fill_(1e6)

    assert torch.equal(found["0.weight"], expected)
    assert found["1.running_mean"].dtype is torch.float16
    with pytest.raises(CheckpointError, match=r"'0.weight' holds 1e\+06"):
        export_safetensors(tmp_path / "large", model, dtype=torch.float16)


@pytest.mark.req("N-10")
def test_env_has_versions_and_settings(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For reports of bugs; no variable beyond those of torch and of this package."""
    monkeypatch.setenv("COMPOSABLE_FSDP_DEBUG", "1")
    monkeypatch.setenv("SECRET_TOKEN", "mine")

    status, out, _ = run("env", "--json")
    _, text, _ = run("env")

    found = json.loads(out)
    assert status == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["torch"]["torch_version"] == torch.__version__
    assert found["environment"]["COMPOSABLE_FSDP_DEBUG"] == "1"
    assert "SECRET_TOKEN" not in found["environment"]
    assert "COMPOSABLE_FSDP_DEBUG" in text


@pytest.mark.req("N-10")
def test_the_version_is_that_of_the_project(run: Run) -> None:
    """The installed one, or that of ``pyproject.toml`` in a checkout."""
    project = Path(__file__).parents[2] / "pyproject.toml"

    status, out, _ = run("--version")

    assert status == 0
    words = out.split()
    assert words[0] == "composable_fsdp"
    assert f'version = "{words[1]}"' in project.read_text()
