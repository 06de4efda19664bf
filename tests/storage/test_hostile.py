"""Claims on checkpoints from strangers: nothing in them runs, nothing outside is read.

Each payload would make a directory if it ran; ``armed`` shows that it would.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as metadata_classes
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from composable_fsdp import convert
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.convert import check_readable
from composable_fsdp.storage.opening import open_source
from tests.storage.samples import sample, saved


class Payload:
    """Makes the directory ``trace`` when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    """A good DCP directory."""
    convert(saved(tmp_path / "good.pt"), tmp_path / "dcp", "dcp")
    return tmp_path / "dcp"


def read_all(path: Path) -> None:
    with open_source(path) as source:
        check_readable(source)


def refusal(path: Path) -> str:
    """What reading all of ``path`` says; it must refuse."""
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    return str(caught.value)


def armed(data: bytes, trace: Path) -> bool:
    """Whether an ordinary unpickler would run the payload in ``data``."""
    pickle.loads(data)
    ran = trace.exists()
    trace.rmdir()
    return ran


@pytest.mark.req("X-21")
@pytest.mark.parametrize("place", ["model", "extra", "whole"])
def test_a_hostile_torch_file_is_refused_and_not_run(
    tmp_path: Path, trace: Path, place: str
) -> None:
    """Whatever part of the file the payload is in; the message names the file."""
    tree: Any = {**sample(), place: Payload(trace)}
    torch.save(Payload(trace) if place == "whole" else tree, tmp_path / "bad.pt")
    assert armed(pickle.dumps(Payload(trace)), trace)

    message = refusal(tmp_path / "bad.pt")

    assert "bad.pt" in message
    assert "nothing in it was run: it asks for posix.mkdir." in message
    assert "weights_only" not in message  # no advice to switch the protection off
    assert not trace.exists()


@pytest.mark.req("X-21")
@pytest.mark.parametrize("place", ["whole", "planner_data", "key"])
def test_hostile_dcp_metadata_is_refused_and_not_run(
    dcp: Path, trace: Path, place: str
) -> None:
    """A payload instead of the metadata, or anywhere in it."""
    metadata: Any = FileSystemReader(dcp).read_metadata()
    payload = Payload(trace)
    if place == "planner_data":
        metadata.planner_data = payload
    elif place == "key":
        metadata.state_dict_metadata["model.scale"] = payload
    data = pickle.dumps(payload if place == "whole" else metadata)
    (dcp / ".metadata").write_bytes(data)
    assert armed(data, trace)

    message = refusal(dcp)

    assert f"{dcp / '.metadata'} holds a pickle with more in it" in message
    assert "posix.mkdir is no part of DCP's metadata" in message
    assert not trace.exists()


@pytest.mark.req("X-21")
@pytest.mark.parametrize("name", ["Metadata", "MetadataIndex", "TensorProperties"])
def test_dcp_metadata_cannot_change_torchs_classes(dcp: Path, name: str) -> None:
    """A pickle can set attributes on the classes that it names, for a whole process."""
    module = "torch.distributed.checkpoint.metadata"
    (dcp / ".metadata").write_bytes(
        f"c{module}\n{name}\n(N}}S'poisoned'\nI1\nstb.".encode()
    )

    refusal(dcp)

    assert not hasattr(getattr(metadata_classes, name), "poisoned")


def put_entry(dcp: Path, value: object) -> None:
    """Save ``value`` in the place of a learning rate."""
    metadata: Any = FileSystemReader(dcp).read_metadata()
    data = io.BytesIO()
    torch.save(value, data)
    (dcp / "__0_1.distcp").write_bytes(data.getvalue())
    for index, place in metadata.storage_data.items():
        if index.fqn == "optim.param_groups.0.lr":
            place.relative_path, place.offset = "__0_1.distcp", 0
            place.length = len(data.getvalue())
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.req("X-21")
def test_a_hostile_dcp_entry_is_refused_and_not_run(dcp: Path, trace: Path) -> None:
    """A saved object, such as a learning rate, that is a pickle of something else."""
    put_entry(dcp, Payload(trace))

    message = refusal(dcp)

    assert "__0_1.distcp, 'optim.param_groups.0.lr', holds a pickle" in message
    assert not trace.exists()


def redirect(dcp: Path, name: str) -> None:
    """Make the metadata name another file for everything."""
    metadata: Any = FileSystemReader(dcp).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = name
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.req("X-21")
@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sub/../../outside", ""])
def test_a_dcp_directory_opens_no_file_outside(dcp: Path, name: str) -> None:
    """A name that leaves the directory is refused, though the file is good."""
    shutil.copy(dcp / "__0_0.distcp", dcp.parent / "outside")
    redirect(dcp, name)

    assert f"names the file {name!r}; expected the plain name" in refusal(dcp)


Change = Callable[[Any], object]


def drop_box(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.scale"].chunks.clear()  # type: ignore[union-attr]  # a tensor's


def double_box(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["model.scale"].chunks  # type: ignore[union-attr]  # a tensor's
    chunks.append(chunks[0])


def other_item(metadata: Metadata) -> None:
    tensor: Any = metadata.state_dict_metadata["model.half.weight"]
    tensor.properties.dtype = torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_box, "'model.scale' has 1 elements, its boxes hold 0"),
        (double_box, r"boxes hold 2 and overlap at \(\)"),
        (other_item, r"something else than a \(7, 3\) tensor of torch.float32"),
    ],
)
def test_metadata_that_does_not_fit_the_data_is_refused(
    dcp: Path, change: Change, message: str
) -> None:
    """A gap would be read as whatever memory held; a wrong box as wrong values."""
    metadata = FileSystemReader(dcp).read_metadata()
    change(metadata)
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(CheckpointError, match=message):
        read_all(dcp)


@pytest.mark.req("X-21")
def test_a_compressed_archive_is_refused_by_its_record(tmp_path: Path) -> None:
    """A small one may fill any memory, and mapped its bytes are no values."""
    good, packed = saved(tmp_path / "good.pt"), tmp_path / "packed.pt"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(packed, "w") as out:
        for record in source.infolist():
            last = record.filename.endswith("data/0")
            kind = zipfile.ZIP_DEFLATED if last else zipfile.ZIP_STORED
            out.writestr(record.filename, source.read(record), kind)

    assert "record 'good/data/0' is compressed" in refusal(packed)


@pytest.mark.req("X-21", "K-10")
@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Nr" + (2**24).to_bytes(4, "little"),
        b"\x96" + (2**30).to_bytes(8, "little"),
    ],
    ids=["number", "bytes"],
)
def test_metadata_that_claims_a_size_fills_no_memory(dcp: Path, data: bytes) -> None:
    """Python's reader in C makes a table of twice as many places as it is told."""
    (dcp / ".metadata").write_bytes(data + b".")

    tracemalloc.start()
    try:
        message = refusal(dcp)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert message.startswith(f"{dcp / '.metadata'} ")
    assert peak < 2**22
