"""The command ``plan``: a table that adds up, a verdict, pictures, and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from composable_fsdp import (
    Float8Wire,
    MixedPrecision,
    forecast,
    measure_activations,
    plan,
)
from composable_fsdp.inspection import plan_models
from composable_fsdp.inspection.plan_models import load_model
from composable_fsdp.inspection.plan_report import KINDS
from composable_fsdp.inspection.sizes import byte_size
from composable_fsdp.naming import size_text
from composable_fsdp.planning.model_units import guess_units
from tests.architectures.zoo import ARCHITECTURES, needs_transformers
from tests.support.scripts import Run

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width=64, blocks=6):
        super().__init__()
        self.tokens = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 500, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def small():
    return Net(blocks=3)

def larger():
    return Net(blocks=8)

def with_inputs():
    return Net(), torch.zeros(2, 16, dtype=torch.long)

def with_loss():
    return *with_inputs(), lambda logits: logits.repeat(1, 1, 40).exp().sum()

def needs(width, depth=3):
    return Net(width)

def number():
    return 3

def reads_values():
    return nn.Linear(2, int(torch.ones(1).item()))

ready = Net()
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A file with models; the path to write before a colon."""
    path = tmp_path / "models_to_plan.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def run(run: Run) -> Run:
    """Call ``plan``: status, standard output and standard error."""
    return partial(run, "plan")


def report_of(run: Run, *arguments: object) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    _, out, err = run(*arguments, "--json")
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.req("N-01", "U-08")
def test_the_numbers_are_those_of_plan_and_add_up(run: Run, script: str) -> None:
    """Rows to totals, kinds to the peak, and both to the plan in Python."""
    found = report_of(
        run,
        f"{script}:Net",
        *("--world-size", 6, "--param-dtype", "bfloat16", "--batch", "2x16"),
        *("--world-sizes", "3,12", "--gpu-memory", "1GiB"),
    )
    model = load_model(f"{script}:Net").module
    planned = plan(
        model,
        world_size=6,
        units=["blocks.*"],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    saved = measure_activations(
        model, planned, [torch.zeros(2, 16, dtype=torch.long)], batch="2x16"
    )
    expected = forecast(planned, activations=saved)

    for column in ("numel", "parameters", "gradients", "optimizer", "sharded"):
        assert found["total"][column] == sum(row[column] for row in found["rows"])
    assert found["total"]["parameters"] == planned.parameter_bytes
    assert found["total"]["gradients"] == planned.gradient_bytes
    assert found["total"]["times"] == len(planned.units)
    assert found["peak"]["bytes"] == sum(found["peak"]["kinds"].values())
    assert found["peak"]["bytes"] == expected.total
    assert found["peak"]["kinds"]["activations"] > 0
    assert found["step"]["all_gather"]["bytes"] == planned.traffic.all_gather_bytes
    assert [row["unit"] for row in found["rows"]] == ["(root)", "blocks.0-5"]
    assert [row["world_size"] for row in found["world_sizes"]] == [3, 12]
    assert all(row["fits"] for row in found["world_sizes"])
    assert found["fit"]["smallest_world_size"] == 1


@pytest.mark.req("N-01")
def test_the_text_says_the_same_numbers(run: Run, script: str) -> None:
    """The rows of both tables sum to their last lines, as printed in bytes."""
    status, out, err = run(f"{script}:Net", "--world-size", 1, "--dtype", "bfloat16")

    assert (status, err) == (0, "")
    assert "Net, 230,528 parameters, on 1 rank: FULL_SHARD" in out
    assert "parameters in bfloat16" in out
    assert "6 Block (entries of its nn.ModuleList)" in out
    assert re.search(r"blocks\.0-5 +6 x +Block +198,528", out)
    assert "activations" in out
    assert "left out" in out
    assert all(KINDS[kind] in out for kind in ("parameters", "gradients", "optimizer"))


@pytest.mark.req("N-01")
def test_a_wire_and_short_names_of_dtypes_are_planned(run: Run, script: str) -> None:
    """The bytes are those of ``plan(module, wire=...)``."""
    found = report_of(run, f"{script}:Net", "--wire", "float8", "--param-dtype", "BF16")
    planned = plan(
        load_model(f"{script}:Net").module,
        world_size=8,
        units=["blocks.*"],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        wire=Float8Wire(),
    )

    assert found["step"]["all_gather"]["bytes"] == planned.traffic.all_gather_bytes
    assert found["peak"]["bytes"] == forecast(planned).total
    assert (
        "all-gathers by Float8Wire(scale='row')"
        in run(f"{script}:Net", "--wire", "float8")[1]
    )


@pytest.mark.parametrize(("width", "dropped"), [(80, True), (140, False)])
def test_a_terminal_gets_tables_that_are_never_cut(
    run: Run, script: str, monkeypatch: pytest.MonkeyPatch, width: int, dropped: bool
) -> None:
    """A narrow terminal leaves columns out, and shows every sum in full."""
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    # rich takes a dumb terminal for one of 80 columns; colors are left out by name.
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")

    status, out, _ = run(f"{script}:Net", "--gpu-memory", "1GiB")
    out = re.sub(r"\x1b\[[0-9;]*m", "", out)
    plain = run(f"{script}:Net", "--json")[1]

    assert status == 0
    assert "…" not in out
    assert ("padding" not in out) is dropped
    assert max(map(len, out.splitlines())) <= width
    (total,) = (
        line for line in out.splitlines() if re.match(r" *\S*total +\d+ x", line)
    )
    sums = json.loads(plain)["total"]
    for column in ("parameters", "gradients", "optimizer", "sharded"):
        assert size_text(sums[column]) in total


@pytest.mark.req("N-01", "U-08")
def test_the_exit_status_says_whether_it_fits(run: Run, script: str) -> None:
    """0 and 1, with what would make it fit; each suggestion, taken, fits."""
    fits, out, _ = run(f"{script}:Net", "--gpu-memory", "1GiB")
    assert fits == 0
    assert "fits: " in out
    assert "smallest world size that fits is 1." in out

    does_not, out, err = run(f"{script}:Net", "--gpu-memory", "1100KiB")
    assert (does_not, err) == (1, "")
    assert "does not fit" in out
    options = re.findall(r"\d, fits: .*?|, fits: .*\((--[^)]*)\)$", out, re.MULTILINE)
    suggested = [each for each in options if each]
    assert suggested
    for each in suggested:
        status, _, _ = run(f"{script}:Net", "--gpu-memory", "1100KiB", *each.split(" "))
        assert status == 0


@pytest.mark.req("N-01")
def test_a_world_size_that_is_named_fits(run: Run, script: str) -> None:
    """And one less does not."""
    memory = ("--gpu-memory", "2000KiB")
    found = report_of(run, f"{script}:Net", "--world-size", 1, *memory)
    smallest = found["fit"]["smallest_world_size"]

    assert smallest > 1
    assert run(f"{script}:Net", "--world-size", smallest, *memory)[0] == 0
    assert run(f"{script}:Net", "--world-size", smallest - 1, *memory)[0] == 1


@pytest.mark.req("N-01", "U-08")
@pytest.mark.parametrize("named", [True, False])
def test_a_config_of_transformers_is_planned(
    run: Run, tmp_path: Path, named: bool
) -> None:
    """The class it names, on meta, with a unit per block; AutoModel without a name."""
    pytest.importorskip("transformers")
    config = {**LLAMA, **({} if named else {"architectures": []})}
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = report_of(run, "--hf", tmp_path, "--world-size", 4, "--batch", "1x32")

    assert found["model"]["class"] == ("LlamaForCausalLM" if named else "LlamaModel")
    assert [row["unit"] for row in found["rows"]][1] == (
        "model.layers.0-2" if named else "layers.0-2"
    )
    assert found["model"]["units_from"].startswith("3 LlamaDecoderLayer")
    assert found["peak"]["kinds"]["activations"] > 0
    assert bool(found["warnings"]) is not named


def test_modules_with_tied_parameters_stay_in_the_root(
    run: Run, tmp_path: Path
) -> None:
    """BERT names its embeddings as a unit, and ties them to its head."""
    pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", **small}
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = report_of(run, tmp_path, "--batch", "2x8")

    assert found["model"]["units_from"].startswith("2 BertLayer (_no_split_modules")
    assert found["model"]["units"] == 1 + 2


@pytest.mark.few(4)
@needs_transformers
@pytest.mark.req("N-01")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_family_is_planned_with_a_batch(
    run: Run, tmp_path: Path, name: str
) -> None:
    """Token ids, images or sound, labels, experts in float32: nothing is left out."""
    model: Any = ARCHITECTURES[name]().model
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))

    found = report_of(run, tmp_path, "--batch", "2x8", "--world-size", 2)

    kinds = found["peak"]["kinds"]
    assert found["peak"]["activations_of"] == "2x8"
    assert kinds["activations"] > 0
    assert found["peak"]["bytes"] == sum(kinds.values())


def test_a_model_whose_input_is_unknown_says_the_way_out(
    run: Run, tmp_path: Path
) -> None:
    """Sound that no configuration describes."""
    pytest.importorskip("transformers")
    config = {"architectures": ["UnivNetModel"], "model_type": "univnet"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    status, out, err = run(tmp_path, "--batch", "2x8")

    assert (status, out) == (2, "")
    assert "--batch makes no input_features" in err
    assert "MODULE:FUNCTION" in err


@pytest.mark.req("N-03")
def test_the_picture_is_the_memory_of_a_step(
    run: Run, script: str, tmp_path: Path
) -> None:
    """Each kind of memory, the phases and the GPU; only pictures are overwritten."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    plan = (f"{script}:Net", "--world-size", 20, "--gpu-memory", "1600KiB")
    found = report_of(run, *plan, "--plot", path)
    drawn = path.read_text()

    assert found["plot"] == str(path)
    kinds = found["peak"]["kinds"]
    words = [KINDS[kind] for kind, nbytes in kinds.items() if nbytes]
    assert all(
        f"<!-- {text} -->" in drawn
        for text in [*words, "forward", "backward", "optimizer"]
    )
    assert f"peak {size_text(found['peak']['bytes'])}" in drawn
    assert "a GPU has 1.56 MiB" in drawn

    status, _, err = run(f"{script}:Net", "--plot", script)
    assert status == 2
    assert "Format 'py' is not supported" in err


@pytest.mark.req("N-01")
def test_two_plans_are_compared(run: Run, script: str, tmp_path: Path) -> None:
    """Models, or saved reports; equal ones are equal."""
    status, out, err = run(f"{script}:Net", f"{script}:larger", "--diff")
    assert (status, err) == (0, "")
    assert re.search(r"\npeak +\S+ [KM]iB +\S+ [KM]iB +\+", out)
    assert re.search(r"blocks\.0-7 +- +8 x Block", out)
    assert re.search(r"all-gathers +13 +17 +\+4", out)

    saved = []
    for name, options in (("a", []), ("b", ["--strategy", "shard-grad-op"])):
        _, text, _ = run(f"{script}:Net", *options, "--json")
        saved.append(tmp_path / f"{name}.json")
        saved[-1].write_text(text)
    found = report_of(run, *saved, "--diff")["differences"]
    assert found["options"] == {"strategy": ["FULL_SHARD", "SHARD_GRAD_OP"]}
    assert found["calls"] == {"all-gathers": [13, 7]}
    assert "equal" in run(saved[0], saved[0], "--diff")[1]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (":needs", "needs arguments: width. Write a function without"),
        (":number", "expects to return a module, .* got 3"),
        (":reads_values", "fails on the meta device.*item"),
        (":Nett", "has no 'Nett'. Did you mean Net"),
        (":torch", "expects to be a module, or a function"),
        ("", "names no model. Write MODULE:FUNCTION"),
        (":Net --units blocks.9", "matches no module. Did you mean 'blocks.5'"),
        (":Net --unit-class Blok", "Its classes are Block, Embedding"),
        (":Net --units tokens,head", "tied|same object"),
        (":Net --strategy hybrid-shard", "expects shard_world_size"),
        (":Net --shard-world-size 3", "divides world_size=8"),
        (":Net --optimizer adamq", "expects one of adamw"),
        (":Net --batch 2x3x4 --world-sizes 0", "is no positive whole number"),
        (":Net --batch two", "expected numbers with x between them, as 4x2048"),
        (":Net --checkpointing", "needs --batch"),
        (":Net --gpu-memory 80xb", "expected a number with KB"),
        (":Net --gpu-memory 80", "has no unit; write 80GiB"),
        (":Net --strategy full_shrd", "Did you mean full-shard"),
        (":Net --diff", "expects two MODELs, got 1"),
    ],
)
def test_a_wrong_command_is_status_two_and_a_way_out(
    run: Run, script: str, target: str, message: str
) -> None:
    """One message on standard error; nothing on standard output."""
    name, *options = target.split(" ")

    status, out, err = run(f"{script}{name}", *options)

    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert "Traceback" not in err


def test_paths_that_are_not_there_say_where_to_go(run: Run, tmp_path: Path) -> None:
    """Modules, files and configurations; JSON has the error, too."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"hidden_size": 3}')
    unknown = tmp_path / "unknown.json"
    unknown.write_text('{"model_type": "llamma"}')
    bad = tmp_path / "bad.py"
    bad.write_text("import no_such_package_anywhere\n")
    for target, message in {
        "no_such_module:build": "There is no module 'no_such_module' here",
        f"{tmp_path}/none.py:build": "There is no file",
        f"{bad}:build": "Importing .* fails: No module named 'no_such_package",
        f"{tmp_path}/none.json": "Nothing is downloaded: get the file",
        str(wrong): "it has no model_type",
        str(unknown): "transformers .* makes no model of",
    }.items():
        status, out, err = run(target)
        assert (status, out) == (2, "")
        assert re.search(message, err), err

    found = json.loads(run("no_such_module:build", "--json")[1])
    assert found["ok"] is False
    assert "no_such_module" in found["error"]


def test_a_missing_transformers_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line that installs it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setitem(sys.modules, "transformers", None)

    status, _, err = run("--hf", tmp_path)

    assert status == 2
    assert "pip install transformers" in err


def test_units_are_found(script: str) -> None:
    """Entries of outermost lists; a model without a list is one unit."""
    names, reason = guess_units(load_model(f"{script}:ready").module)
    assert names == [f"blocks.{i}" for i in range(6)]
    assert reason == "6 Block (entries of its nn.ModuleList)"
    assert guess_units(torch.nn.Linear(2, 2)) == ([], "the whole model is one unit")
    assert plan_models.inputs_for(load_model(f"{script}:ready"), (2, 3))[0].dtype is (
        torch.long
    )


def test_inputs_that_a_function_returns_are_the_batch(run: Run, script: str) -> None:
    """Activations are counted, and the text says of which inputs."""
    found = report_of(run, f"{script}:with_inputs")
    by_option = report_of(run, f"{script}:Net", "--batch", "2x16")

    assert found["peak"]["activations_of"] == "2x16"
    assert found["peak"]["kinds"] == by_option["peak"]["kinds"]
    fewer = report_of(run, f"{script}:with_inputs", "--batch", "1x8")
    assert fewer["peak"]["bytes"] < found["peak"]["bytes"]


@pytest.mark.req("N-01")
def test_a_loss_outside_of_the_model_is_counted(run: Run, script: str) -> None:
    """A loss of 40 times the logits outweighs this model."""
    plain = report_of(run, f"{script}:with_inputs", "--optimizer", "none")
    found = report_of(run, f"{script}:with_loss", "--optimizer", "none")

    logits = 2 * 16 * 500 * 4
    # exp saves the copies, and its backward makes as many gradients.
    assert found["peak"]["bytes"] - plain["peak"]["bytes"] > 60 * logits


def test_sizes_have_both_kinds_of_units() -> None:
    """Powers of 1000 and of 1024."""
    assert byte_size("80GiB") == 80 * 2**30
    assert byte_size("80 gb") == 80 * 10**9
    assert byte_size("7B") == 7


@pytest.mark.slow
def test_the_module_runs_in_the_directory_of_a_script(script: str) -> None:
    """``python -m`` finds the script beside it; a closed pipe is no error."""
    folder = Path(script).parent
    command = f"{sys.executable} -m composable_fsdp plan models_to_plan:Net"
    done = subprocess.run(
        f"{command} | head -1",
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert done.stdout.startswith("Net, 230,528 parameters")
    assert done.stderr == ""
