"""Claims on ``save_pretrained`` and ``load_pretrained`` of sharded models.

The other side is always transformers: its ``save_pretrained`` of the plain model, its
``from_pretrained`` of our files.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from composable_fsdp import fully_shard, unshard_params
from composable_fsdp.errors import CheckpointError
from composable_fsdp.hugging_face import (
    NoSplitPolicy,
    load_pretrained,
    save_pretrained,
)
from composable_fsdp.integrations.hf_adapters import adapter_values
from composable_fsdp.state_dict.full import gather_unit
from composable_fsdp.storage import export
from composable_fsdp.storage.formats.files import SafetensorsSource
from composable_fsdp.storage.source import Copy
from tests.architectures.zoo import ARCHITECTURES, build, needs_transformers
from tests.parallel.models import Recipe, mesh_of
from tests.parallel.models import sharded as sharded_over
from tests.support.on_ranks import on_ranks
from tests.support.place import World

pytestmark = needs_transformers


def made(name: str) -> Any:
    """Return a model with the same weights on every rank, in no file so far."""
    torch.manual_seed(3)
    return build(name).model


def sharded(model: nn.Module) -> Any:
    """Return the model, sharded by the layers that the model names."""
    return fully_shard(model, policy=NoSplitPolicy())


def same_as_plain(model: nn.Module, plain: nn.Module) -> bool:
    """Whether parameters and all buffers are the plain model's.

    Collective: gathers.
    """
    with unshard_params(model, writeback=False):
        pairs = zip(_tensors(model), _tensors(plain), strict=True)
        return all(n == m and torch.equal(v, w) for (n, v), (m, w) in pairs)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def files_of(folder: Path) -> dict[str, Any]:
    """Return the content of each file of a folder, tensors as lists."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found[path.name] = {
                name: (str(value.dtype), value.tolist())
                for name, value in load_file(path).items()
            }
        else:
            found[path.name] = json.loads(path.read_text())
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("size", ["5GB", "2KB"])
@on_ranks(2)
def test_a_sharded_model_is_saved_as_transformers_saves_the_plain_one(
    world: World, name: str, size: str, tmp_path: Path
) -> None:
    """The same files, with the same tensors, index and configurations."""
    plain = made(name)
    model = sharded(copy.deepcopy(plain))
    if world.rank == 0:
        plain.save_pretrained(tmp_path / "plain", max_shard_size=size)

    save_pretrained(model, tmp_path / "sharded", max_shard_size=size)

    if world.rank == 0:
        made_of, plain_of = (files_of(tmp_path / n) for n in ("sharded", "plain"))
        if name == "mixtral":
            # huggingface_hub counts the memory that experts share while they are views
            # of a single tensor, and so ends a file elsewhere.
            made_of, plain_of = map(without_cuts, (made_of, plain_of))
        assert made_of == plain_of


def without_cuts(files: dict[str, Any]) -> dict[str, Any]:
    """Return tensors and configurations without the file that holds each tensor."""
    merged: dict[str, Any] = {}
    for name, content in files.items():
        if name.endswith(".safetensors"):
            merged.update(content)
        else:
            merged[name] = content.get("metadata", content)
    return merged


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("size", ["5GB", "2KB"])
@on_ranks(2)
def test_files_of_transformers_are_loaded_into_a_model_on_meta(
    world: World, name: str, size: str, tmp_path: Path
) -> None:
    """Parameters, ties and buffers that no file has are those of from_pretrained."""
    plain = made(name)
    if world.rank == 0:
        plain.save_pretrained(tmp_path, max_shard_size=size)
    world.barrier()
    with torch.device("meta"):
        model = sharded(made(name))

    load_pretrained(model, tmp_path)

    assert same_as_plain(model, plain)


@on_ranks(2)
def test_each_rank_reads_its_part_of_the_files(world: World, tmp_path: Path) -> None:
    """The elements that all ranks read are those of the model, each once."""
    plain = made("llama")
    if world.rank == 0:
        plain.save_pretrained(tmp_path, max_shard_size="2KB")
    world.barrier()
    with torch.device("meta"):
        model = sharded(made("llama"))
    read: list[tuple[str, int, int]] = []
    original = SafetensorsSource.finish

    def finish(source: SafetensorsSource, copies: Sequence[Copy]) -> None:
        read.extend((each.name, *each.span[:2]) for each in copies)
        original(source, copies)

    with mock.patch.object(SafetensorsSource, "finish", finish):
        load_pretrained(model, tmp_path)

    own = sum(stop - start for _, start, stop in read)
    held = sum(each.numel() for each in model.parameters())
    total = sum(each.numel() for each in plain.parameters())
    assert own == held < total
    assert sum(world.gather(own)) == total


@on_ranks(2)
def test_a_save_holds_one_unit_at_a_time(world: World, tmp_path: Path) -> None:
    """The first rank receives a unit's values after the unit before was written."""
    model = sharded(made("llama"))
    alive: list[int] = []
    kept: list[weakref.ref[Tensor]] = []
    original = gather_unit

    def gather(*args: Any, **kwargs: Any) -> dict[int, Tensor]:
        alive.append(sum(each() is not None for each in kept))
        values = original(*args, **kwargs)
        kept.extend(map(weakref.ref, values.values()))
        return values

    with mock.patch.object(export, "gather_unit", gather):
        save_pretrained(model, tmp_path)

    assert alive == [0, 0, 0]


@on_ranks(2, 4)
def test_adapters_that_tensor_parallelism_cuts_are_whole(world: World) -> None:
    """On the first rank alone, as those of the plain model."""
    mesh, recipe = mesh_of(world, world.world_size // 2), Recipe()
    model: Any = sharded_over(recipe.parallel(mesh), mesh)
    model.base_model = None  # as of a PeftModel

    values = adapter_values(model, keeps=not world.rank)

    assert len(values) == (len([*recipe.plain().parameters()]) if not world.rank else 0)
    assert all(
        type(value) is Tensor and torch.equal(value, recipe.plain().get_parameter(name))
        for name, value in values.items()
    )


@on_ranks(2)
def test_an_error_of_the_writing_rank_is_raised_on_all(
    world: World, tmp_path: Path
) -> None:
    """No rank waits for a rank that could not write."""
    model = sharded(made("llama"))
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match="On rank 0: the checkpoint could not"):
        save_pretrained(model, tmp_path / "file" / "folder")

    assert same_as_plain(model, made("llama"))


@on_ranks(2)
def test_a_folder_that_one_rank_lacks_is_an_error_on_all(
    world: World, tmp_path: Path
) -> None:
    """No rank waits for a rank that has nothing to open."""
    save_pretrained(sharded(made("llama")), tmp_path / "there")
    model = sharded(made("llama"))

    with pytest.raises(CheckpointError, match="absent"):
        load_pretrained(model, tmp_path / ("absent" if world.rank else "there"))

    assert same_as_plain(model, made("llama"))


@on_ranks(2)
def test_files_of_another_model_are_refused_with_the_names(
    world: World, tmp_path: Path
) -> None:
    """Nothing is loaded, and the names that differ are told."""
    save_pretrained(sharded(made("gpt2")), tmp_path)
    model = sharded(made("llama"))

    with pytest.raises(CheckpointError, match=r"Missing in the checkpoint: .*layers"):
        load_pretrained(model, tmp_path)

    assert same_as_plain(model, made("llama"))


@pytest.mark.parametrize("size", ["five", "5", 0, "-1GB", "1.2.3GB"])
def test_a_size_that_cannot_be_read_is_refused(size: Any, tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match=r"max_shard_size: .*(no size|no unit)"):
        save_pretrained(made("llama"), tmp_path / "out", max_shard_size=size)

    assert list(tmp_path.iterdir()) == []
