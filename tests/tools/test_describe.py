"""``describe`` and ``inspect``: who holds what, against what ranks and files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from composable_fsdp import (
    convert,
    describe,
    fully_shard,
    load,
    save,
)
from composable_fsdp.tools.command_line import main
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.world import World, fake_world


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
