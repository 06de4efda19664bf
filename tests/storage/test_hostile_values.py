"""Claims on values in checkpoints from strangers that outgrow or confuse a reader."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from composable_fsdp import CheckpointError, convert
from composable_fsdp.storage.convert import check_readable
from composable_fsdp.storage.opening import open_source
from tests.storage.samples import everything, sample, saved


def refusal(path: Path) -> str:
    """What reading all of ``path`` says; it must refuse."""

    def read() -> None:
        with open_source(path) as source:
            check_readable(source)
            everything(source)

    with pytest.raises(CheckpointError) as caught:
        read()
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def endless() -> Any:
    """Lists of a few bytes in a pickle, and of 2 ** 64 items when they are walked."""
    value: list[Any] = [1]
    for _ in range(64):
        value = [value, value]
    return value


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> Any:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


TOO_LARGE: dict[str, Callable[[], Any]] = {
    "endless": endless,
    "itself": itself,
    "deep": deep,
    "expanded": lambda: torch.ones(2).expand(2**20, 2**20, 2),
}


@pytest.mark.req("X-21")
@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_value_larger_than_its_bytes_is_refused(tmp_path: Path, what: str) -> None:
    """In a torch file: before it is walked, printed or allocated."""
    torch.save({**sample(), "extra": TOO_LARGE[what]()}, tmp_path / "bad.pt")

    message = refusal(tmp_path / "bad.pt")

    assert "which no checkpoint does" in message
    assert "bad.pt, extra" in message


class Hashed:
    """A set of a value that takes forever to hash, once unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        value: Any = (1,)
        for _ in range(64):
            value = (value, value)
        return set, ([value],)


@pytest.mark.req("X-21", "K-10")
@pytest.mark.parametrize("new", [True, False])
def test_a_key_that_takes_forever_to_hash_is_refused(tmp_path: Path, new: bool) -> None:
    """A few bytes of tuples that share their halves; in files before torch 1.6, too."""
    tree = {**sample(), "extra": Hashed()}
    path = tmp_path / "bad.pt"
    torch.save(tree, path, _use_new_zipfile_serialization=new)

    assert "more than 25 tuples in a tuple" in refusal(path)


@pytest.mark.req("X-21")
@pytest.mark.parametrize("name", ["_metadata", "values", "get"])
def test_attributes_of_a_saved_dict_are_not_trusted(tmp_path: Path, name: str) -> None:
    """A pickle may set any on an OrderedDict, as torch does with ``_metadata``."""
    model = OrderedDict(weight=torch.ones(2))
    setattr(model, name, 5)
    torch.save({"model": model}, tmp_path / "odd.pt")

    with open_source(tmp_path / "odd.pt") as source:
        assert torch.equal(source.read_model("weight", 0, 2), torch.ones(2))


@pytest.mark.req("X-21")
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[" * 10**5 + "]" * 10**5, "is damaged"),
        (json.dumps({"weight_map": {"scale": "\ud800"}}), "cannot be opened"),
    ],
    ids=["deep", "half a character"],
)
def test_an_index_that_confuses_a_reader_is_refused(
    tmp_path: Path, index: str, message: str
) -> None:
    """JSON too deep for its reader, and a name that no system encodes."""
    (tmp_path / "model.safetensors.index.json").write_text(index)

    assert message in refusal(tmp_path)


def claim(metadata: Metadata) -> None:
    """A tensor in the extra state, which would be allocated whole."""
    tensor: Any = metadata.state_dict_metadata["extra.list.1.a"]
    tensor.size = tensor.chunks[0].sizes = torch.Size([2**40])


def no_dtype(metadata: Metadata) -> None:
    tensor: Any = metadata.state_dict_metadata["model.scale"]
    tensor.properties.dtype = endless()


def no_place(metadata: Metadata) -> None:
    assert metadata.planner_data is not None
    metadata.planner_data["model.scale"] = ()


@pytest.mark.req("X-21")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (claim, r"bytes hold less"),
        (no_dtype, "the dtype of a tensor is"),
        (no_place, "puts a value at no place"),
    ],
)
def test_dcp_metadata_that_claims_too_much_is_refused(
    tmp_path: Path, change: Callable[[Metadata], None], message: str
) -> None:
    """More elements than a file has bytes; values too large to print; no place."""
    convert(saved(tmp_path / "good.pt"), tmp_path / "dcp", "dcp")
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    change(metadata)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))

    assert message in refusal(tmp_path / "dcp")
