"""The command ``plan``: reports that add up, verdicts, and errors."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from composable_fsdp import MixedPrecision, forecast, plan
from composable_fsdp.naming import size_text
from composable_fsdp.tools import measure_activations
from composable_fsdp.tools.models import load_model
from composable_fsdp.tools.plan_report import KINDS
from tests.architectures.zoo import ARCHITECTURES, needs_transformers
from tests.support.scripts import Run


@pytest.fixture
def run_plan(run: Run) -> Run:
    """Call ``plan``: status, standard output and standard error."""
    return partial(run, "plan")


def report_of(run_plan: Run, *arguments: object) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    _, out, err = run_plan(*arguments, "--json")
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.req("N-01", "U-08")
def test_the_numbers_are_those_of_plan_and_add_up(run_plan: Run, script: str) -> None:
    """Rows to totals, kinds to the peak, and both to the plan in Python."""
    found = report_of(
        run_plan,
        f"{script}:Net",
        *("--world-size", 6, "--param-dtype", "bfloat16", "--batch", "2x16"),
        *("--gpu-memory", "1GiB"),
    )
    model = load_model(f"{script}:Net").module
    planned = plan(
        model,
        world_size=6,
        units=["blocks.*"],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    ids = torch.zeros(2, 16, dtype=torch.long)
    saved = measure_activations(model, planned, [ids])
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
    assert found["fit"]["smallest_world_size"] == 1


@pytest.mark.req("N-01", "U-08")
def test_the_exit_status_says_whether_it_fits(run_plan: Run, script: str) -> None:
    """0 and 1, with what would make it fit; each suggestion, taken, fits."""
    fits, out, _ = run_plan(f"{script}:Net", "--gpu-memory", "1GiB")
    assert fits == 0
    assert "fits without activations: " in out
    assert "smallest world size that fits is 1." in out

    does_not, out, err = run_plan(f"{script}:Net", "--gpu-memory", "1000KiB")
    assert (does_not, err) == (1, "")
    assert "does not fit" in out
    suggested = re.findall(r", fits: (--.*)$", out, re.MULTILINE)
    assert suggested
    for each in suggested:
        status, _, _ = run_plan(
            f"{script}:Net", "--gpu-memory", "1000KiB", *each.split(" ")
        )
        assert status == 0
    # Of several changes together only sets that fit.
    many = f"{script}:Net", "--strategy", "zero2", "--gpu-memory", "500KiB"
    changes = report_of(run_plan, *many)["fit"]["changes"]
    assert {each["fits"] for each in changes if " --" in each["options"]} == {True}

    placed = "--placement", "gradients=shard,states=shard"
    _, out, _ = run_plan(f"{script}:Net", "--gpu-memory", "1000KiB", *placed)
    assert ": --strategy full-shard, without --placement" in out


@pytest.mark.few(2)
@needs_transformers
@pytest.mark.req("N-01")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_family_of_text_is_planned_with_a_batch(
    run_plan: Run, tmp_path: Path, name: str
) -> None:
    """Token ids, labels, experts in float32; images and sound say the way out."""
    model: Any = ARCHITECTURES[name]().model
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    given = (tmp_path, "--batch", "2x8", "--world-size", 2)
    if name in ("vit", "whisper", "clip"):
        status, out, err = run_plan(*given)
        assert (status, out) == (2, "")
        assert re.search("makes token ids and no (pixel_val|input_feat).*MODULE:F", err)
        return

    found = report_of(run_plan, *given)

    kinds = found["peak"]["kinds"]
    assert found["peak"]["activations_of"] == "2x8"
    assert kinds["activations"] > 0
    assert found["peak"]["bytes"] == sum(kinds.values())


@pytest.mark.req("N-01")
def test_classes_that_repeat_are_units_wherever_they_are(
    run_plan: Run, script: str
) -> None:
    """Blocks in a sequence or under names of their own; layers, if there are none."""
    blocks = report_of(run_plan, f"{script}:in_sequence")
    layers = report_of(run_plan, f"{script}:plain_layers")

    assert [row["unit"] for row in blocks["rows"]] == ["(root)", "1.0-1", "last"]
    assert blocks["model"]["units_from"].startswith("3 Block (classes that")
    assert [row["unit"] for row in layers["rows"]] == ["(root)", "0,2"]


@pytest.mark.req("N-03")
def test_the_picture_is_the_memory_of_a_step(
    run_plan: Run, script: str, tmp_path: Path
) -> None:
    """Each kind of memory, the phases and the GPU; only pictures are overwritten."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    plan = (f"{script}:Net", "--world-size", 20, "--gpu-memory", "1600KiB")
    found = report_of(run_plan, *plan, "--plot", path)
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

    status, _, err = run_plan(f"{script}:Net", "--plot", script)
    assert status == 2
    assert "Format 'py' is not supported" in err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (":needs", "needs arguments: .*'width'. Write a function without"),
        (":reads_values", "fails on the meta device.*item"),
        (":Nett", "has no 'Nett' .did you mean Net"),
        (":torch", "expects to be a module, or a function"),
        ("", "names no model. Write MODULE:FUNCTION"),
        (":Net --units blocks.9", "matches no module .did you mean 'blocks.5'"),
        (":Net --unit-class Blok", "Its classes are Block, Embedding"),
        (":Net --units tokens,head", "tied|same object"),
        (":Net --strategy hybrid-shard", "expects shard_world_size"),
        (":Net --optimizer adamq", "expects one of adamw"),
        (":Net --batch 2x3x4 --world-size 0", "is no positive whole number"),
        (":Net --checkpointing", "needs --batch"),
        (":Net --units head --unit-class Block", "give one of them"),
        (":Net --gpu-memory 80", "has no unit; write 80GiB"),
        (":Net --strategy full_shrd", "did you mean full-shard"),
        (":Net --placement states=rows", "expects a mesh with dim 'rows'"),
        (":Net --placement shard", "as parameters=shard,between=shard,.*'shard'"),
        (":Net --placement states=shard --strategy zero2", "not both"),
        (":Net --hf config.json", "Write one MODEL"),
    ],
)
def test_a_wrong_command_is_status_two_and_a_way_out(
    run_plan: Run, script: str, target: str, message: str
) -> None:
    """One message on standard error; nothing on standard output."""
    name, *options = target.split(" ")

    status, out, err = run_plan(f"{script}{name}", *options)

    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert "Traceback" not in err


def test_paths_that_are_not_there_say_where_to_go(
    run_plan: Run, tmp_path: Path
) -> None:
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
        f"{bad}:build": "Importing .* fails: .*No module named 'no_such_package",
        f"{tmp_path}/none.json": "Nothing is downloaded: get the file",
        "gpt2": "`hf download MODEL config.json` gets",
        str(wrong): "makes no model of .* `model_type` key",
        str(unknown): "transformers .* makes no model of",
    }.items():
        status, out, err = run_plan(target)
        assert (status, out) == (2, "")
        assert re.search(message, err), err

    found = json.loads(run_plan("no_such_module:build", "--json")[1])
    assert found["ok"] is False
    assert "no_such_module" in found["error"]


@pytest.mark.req("N-01")
def test_a_loss_outside_of_the_model_is_counted(run_plan: Run, script: str) -> None:
    """A loss of 40 times the logits outweighs this model."""
    plain = report_of(run_plan, f"{script}:with_inputs", "--optimizer", "none")
    found = report_of(run_plan, f"{script}:with_loss", "--optimizer", "none")

    logits = 2 * 16 * 500 * 4
    # exp saves the copies, and its backward makes as many gradients.
    assert found["peak"]["bytes"] - plain["peak"]["bytes"] > 60 * logits
