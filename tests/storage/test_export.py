"""Claims on export: a sharded model becomes files that others load, however cut."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from composable_fsdp import (
    Block,
    CheckpointError,
    convert,
    export_safetensors,
    fully_shard,
    open_source,
    optim_state_dict,
    save,
)
from composable_fsdp.comm.agreement import TIMEOUT_VARIABLE
from composable_fsdp.comm.collectives import record
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.storage.samples import everything, same
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import gpt_input, loss_of
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
    one_to_three_ranks,
    several_ranks,
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
    assert same(found, dict(plain.state_dict()))
    assert same(dict(sharded.state_dict()), dict(plain.state_dict()))
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
@on_ranks(1, 2, 3)
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
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    kinds = {call.op for call in calls}
    assert kinds <= {"gather", "all_gather_object"}
    assert "head.weight" not in load_file(out)


def check_failure(world: World, folder: str) -> list[Any]:
    model = gpt("composable")
    with record() as calls:
        taken = message_of(lambda: export_safetensors(Path(folder), model))
    assert "gather" not in {call.op for call in calls}
    if world.rank == 0:
        torch.save({}, Path(folder) / "full")
    nowhere = Path(folder) / "full" / "out"
    missing = message_of(lambda: export_safetensors(nowhere, model))
    return [taken, missing, sorted(p.name for p in Path(folder).iterdir())]


def test_all_ranks_have_the_outcome_of_the_one_that_writes(
    ranks: RankCount, tmp_path: Path
) -> None:
    """An existing path and one that cannot be made: every rank raises, none hangs."""
    results = ranks(2).run(check_failure, str(tmp_path))

    for taken, missing, left in results:
        assert "exists already, and nothing is overwritten" in taken
        assert "cannot be made" in missing
        assert left == ["full"]
    assert results[0] == results[1]


def hugging_face() -> Any:
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def check_hugging_face(world: World, folder: str) -> None:
    model = hugging_face()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)

    export_safetensors(Path(folder) / "out", model, max_shard_bytes=2000)


@pytest.mark.req("U-06")
def test_from_pretrained_loads_what_was_exported(
    ranks: RankCount, tmp_path: Path
) -> None:
    """A tied GPT-2 in many files, from two ranks: no weight missing, outputs equal."""
    ranks(2).run(check_hugging_face, str(tmp_path))
    out, model = tmp_path / "out", hugging_face()
    model.config.save_pretrained(out)

    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(
        out, output_loading_info=True
    )

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]


def test_a_plain_module_is_exported_without_a_group(tmp_path: Path) -> None:
    """Also one with buffers; a name that ends in .safetensors is one file."""
    model = nn.Sequential(tiny_mlp(), nn.BatchNorm1d(8))

    export_safetensors(tmp_path / "out.safetensors", model)

    found = load_file(tmp_path / "out.safetensors")
    assert same(found, dict(model.state_dict()))


def test_a_lazily_negated_buffer_is_exported_with_its_values(tmp_path: Path) -> None:
    """The imaginary part of a conjugate is real, and its memory has the other sign."""
    model = nn.Linear(1, 1)
    model.register_buffer("offset", torch.tensor([1 + 2j]).conj().imag)
    assert model.get_buffer("offset").is_neg()

    export_safetensors(tmp_path / "out.safetensors", model)

    assert load_file(tmp_path / "out.safetensors")["offset"].tolist() == [-2.0]


def test_a_module_without_values_is_refused(tmp_path: Path) -> None:
    """By name, and nothing is written."""
    with pytest.raises(CheckpointError, match="'weight', 'bias' are on meta"):
        export_safetensors(tmp_path / "out", nn.Linear(2, 2, device="meta"))

    assert list(tmp_path.iterdir()) == []


def check_disk_full(world: World, folder: str) -> list[str]:
    model = gpt("composable")
    # The pool's ranks find each other through a file, which must not be cut short.
    export_safetensors(Path(folder) / "before", model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        # The ranks would meet through that file, too.
        with mock.patch.dict(os.environ, {TIMEOUT_VARIABLE: "0"}):
            text = message_of(lambda: export_safetensors(Path(folder) / "out", model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    step(model, torch.optim.SGD(model.parameters()), world.rank, 0)
    return [text, *(path.name for path in Path(folder).iterdir())]


def test_a_full_disk_is_one_error_on_all_ranks(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Nothing is left behind, and training goes on."""
    first, second = ranks(2).run(check_disk_full, str(tmp_path))

    assert first == second
    assert "could not be written" in first[0]
    assert first[1:] == ["before"]


@on_ranks(2)
def test_an_export_between_forward_and_backward_harms_neither(
    world: World, tmp_path: Path
) -> None:
    """It says so or works, on every rank alike, and backward still runs."""
    folder = str(tmp_path)
    model = gpt("composable")
    loss = loss_of(model, gpt_input(0, world.rank))
    text = message_of(lambda: export_safetensors(Path(folder) / "out", model))
    assert text == "nothing was raised" or text.startswith("PhaseError")
    loss.backward()  # type: ignore[no-untyped-call]


def check_run(world: World, folder: str) -> None:
    model = gpt("composable", tied_head=True)
    optim = torch.optim.AdamW(model.parameters())
    step(model, optim, world.rank, 0)
    save(Path(folder) / "native", model, optim, extra={"epoch": 1})
    full = {"model": dict(model.state_dict()), "optim": optim_state_dict(model, optim)}
    if world.rank == 0:
        torch.save(full, Path(folder) / "expected.pt")


@pytest.mark.req("U-06")
@pytest.mark.parametrize("to", ["dcp", "torch", "native"])
@several_ranks
def test_what_several_ranks_saved_converts_to_what_gathering_gives(
    ranks: RankCount, tmp_path: Path, world_size: int, to: str
) -> None:
    """Weights, ties and optimizer state of a sharded run, by the plain names."""
    ranks(world_size).run(check_run, str(tmp_path))

    convert(tmp_path / "native", tmp_path / "out", to)

    with open_source(tmp_path / "out") as out:
        found = everything(out)
    with open_source(tmp_path / "expected.pt") as expected:
        gathered = everything(expected)
    assert found.pop("extra") == {"epoch": 1}
    assert gathered.pop("extra") is None
    assert same(found, gathered)
