"""Claims on export: a sharded model becomes files that others load, however cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from composable_fsdp import Block, convert, fully_shard, optim_state_dict, save
from composable_fsdp.comm.collectives import record
from composable_fsdp.planning.partition import interval_boxes
from composable_fsdp.storage import export_safetensors, open_source
from composable_fsdp.storage.export import export_module
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.storage.samples import everything
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    one_to_three_ranks,
    step,
)
from tests.support.world import World


class Parts(nn.Module):
    """Shapes that cut badly: many dims, scalars, nothing, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.cube = draw(3, 5, 7)
        self.tall = draw(7, 5)
        self.low = nn.Parameter(torch.randn(5, generator=generator).bfloat16())
        self.scalar = draw()
        self.none = draw(0, 4)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def check_layouts(world: World, folder: str, limit: int) -> int:
    plain, sharded = Parts(), Parts()
    fully_shard(sharded, block=Block.ELEMENT)
    boxes = _boxes_on_this_rank(sharded)
    path = Path(folder) / f"out-{world.world_size}"

    export_safetensors(path, sharded, max_shard_bytes=limit)

    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        found.update(load_file(file))
    assert _same(found, dict(plain.state_dict()))
    assert _same(dict(sharded.state_dict()), dict(plain.state_dict()))
    return boxes


def _boxes_on_this_rank(model: nn.Module) -> int:
    """The most boxes that this rank holds of one parameter."""
    return max(
        len(interval_boxes(slot.shape, *region.layout.interval(slot, region.rank)))
        for handle in _get_fsdp_handles(model)
        for region in handle.layout.regions
        for slot in region.layout.parameters
    )


@pytest.mark.few(2)
@pytest.mark.req("D-17", "U-06")
@pytest.mark.parametrize("limit", [10**9, 200], ids=["one-file", "many-files"])
@one_to_three_ranks
def test_a_parameter_in_several_boxes_on_a_rank_is_exported_whole(
    ranks: RankCount, tmp_path: Path, world_size: int, limit: int
) -> None:
    """Element blocks cut through rows, so a rank holds boxes: none is lost."""
    boxes = ranks(world_size).run(check_layouts, str(tmp_path), limit)

    assert world_size == 1 or max(boxes) > 1


@pytest.mark.req("U-06")
@on_ranks(2)
@both_paths
def test_a_tied_model_is_exported_with_the_plain_names(
    world: World, path: str, tmp_path: Path
) -> None:
    """safetensors' own loader takes it strictly; the tie is stored once, and told."""
    folder = str(tmp_path)
    model = gpt(path, tied_head=True)
    out = Path(folder) / "out.safetensors"

    with record() as calls:
        export_safetensors(out, model)

    other = TinyGPT(tied_head=True, seed=5)
    missing, unexpected = load_model(other, out)
    assert (list(missing), list(unexpected)) == ([], [])
    assert _same(dict(other.state_dict()), dict(model.state_dict()))
    kinds = {call.op for call in calls}
    assert kinds <= {"gather", "all_gather_object"}
    assert "head.weight" not in load_file(out)


def check_run(world: World, folder: str) -> None:
    model = gpt("composable", tied_head=True)
    optim = torch.optim.AdamW(model.parameters())
    step(model, optim, world.rank, 0)
    save(Path(folder) / "native", model, optim, extra={"epoch": 1})
    full = {"model": dict(model.state_dict()), "optim": optim_state_dict(model, optim)}
    if world.rank == 0:
        torch.save(full, Path(folder) / "expected.pt")


@pytest.mark.req("U-06")
def test_what_several_ranks_saved_converts_to_what_gathering_gives(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Weights, ties and optimizer state of a sharded run, by the plain names."""
    ranks(3).run(check_run, str(tmp_path))

    with open_source(tmp_path / "expected.pt") as expected:
        gathered = {**everything(expected), "extra": {"epoch": 1}}
    formats: list[Any] = ["dcp", "torch", "native"]
    for to in formats:
        convert(tmp_path / "native", tmp_path / f"to-{to}", to)
        with open_source(tmp_path / f"to-{to}") as out:
            assert _same(everything(out), gathered), to


@on_ranks(2)
def test_tensors_in_no_unit_are_rewritten_together(
    world: World, tmp_path: Path
) -> None:
    """As transformers does, which makes one tensor of those of several experts."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    for p in model[1].parameters():
        nn.init.constant_(p, 3.0)

    def joined(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: v for name, v in values.items() if name.startswith("0.")}
        if rows := [values[n] for n in ("1.weight", "1.bias") if n in values]:
            found["1"] = torch.cat([each.view(-1, 2) for each in rows])
        return found

    if export_module(tmp_path / "out", model, 1000, rewrite=joined):
        made = load_file(tmp_path / "out" / "model.safetensors")
        assert torch.equal(made["1"], torch.full((3, 2), 3.0))
