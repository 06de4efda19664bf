"""Checkpoints from strangers: nothing in them runs, no more is read than they are.

Each payload would make a directory if it ran; ``armed`` shows that it would.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as metadata_classes
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from composable_fsdp import LoadOptions, convert, load, save, verify
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage import native
from composable_fsdp.storage.convert import check_readable
from composable_fsdp.storage.load_optim import STATES
from composable_fsdp.storage.opening import open_source
from tests.storage.samples import sample, saved
from tests.support.sharded import message_of


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


TERABYTE = 1 << 40


def sparse(path: Path, start: bytes = b"") -> None:
    """A file of a terabyte that takes no space."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(TERABYTE)


@pytest.mark.req("K-10", "X-21")
@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("manifest.json", b""),
        ("manifest.json", b'{"crc32": "00000000", "manifest":\n'),
        (".metadata", b"\x80\x02"),
        ("model.safetensors.index.json", b"{"),
    ],
)
def test_a_document_of_a_terabyte_is_refused_by_its_size(
    name: str, start: bytes, tmp_path: Path
) -> None:
    """It is never read: memory stays, and the message names it and the limit."""
    sparse(tmp_path / "bad" / name, start)

    tracemalloc.start()
    text = message_of(lambda: load(tmp_path / "bad", nn.Linear(2, 2)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert text.startswith(f"CheckpointError: {tmp_path}/bad/{name} has {TERABYTE} byt")
    assert "of at most 1073741824" in text
    assert peak < 1 << 24


@pytest.mark.req("X-21")
def test_slices_of_a_strided_tensor_are_those_of_its_copy(tmp_path: Path) -> None:
    """Transposed, with steps, expanded in the middle, and of no dims."""
    tensors = {
        "across": torch.arange(24.0).view(4, 6).t(),
        "steps": torch.arange(60.0).view(5, 12)[::2, 1::3],
        "middle": torch.arange(6.0).view(2, 1, 3).expand(2, 4, 3),
        "scalar": torch.tensor(3.0),
    }
    torch.save(tensors, tmp_path / "odd.pt")

    with open_source(tmp_path / "odd.pt") as source:
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1)
            for start in range(flat.numel() + 1):
                for stop in range(start, flat.numel() + 1):
                    read = source.read_model(name, start, stop)
                    assert torch.equal(read, flat[start:stop])


@pytest.mark.req("K-10")
@pytest.mark.parametrize("kind", [MemoryError, RecursionError])
def test_exhausted_memory_or_stack_names_the_checkpoint(
    kind: type[Exception], tmp_path: Path
) -> None:
    """Of every entry that opens a checkpoint."""
    model = nn.Linear(2, 2)
    save(tmp_path / "run", model)

    def opened() -> None:
        open_source(tmp_path / "run").close()

    with mock.patch.object(native, "parse", side_effect=kind):
        texts = [message_of(opened), message_of(partial(load, tmp_path, model))]
        found = verify(tmp_path)

    for text in [*texts, f"CheckpointError: {found.problems[0]}"]:
        assert text.startswith(f"CheckpointError: {tmp_path}/run")
        assert "asks for more" in text


@pytest.mark.req("K-10", "X-21")
def test_load_compares_the_checksums_of_a_torch_file(tmp_path: Path) -> None:
    """A flipped bit of a weight is told, and no weight has changed."""
    model = nn.Linear(8, 8)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    at = data.index(model.weight.detach().numpy().tobytes())
    data[at + 3] ^= 0x40
    (tmp_path / "x.pt").write_bytes(data)
    other = nn.Linear(8, 8)
    before = [each.clone() for each in other.parameters()]

    text = message_of(lambda: load(tmp_path / "x.pt", other))

    assert "x.pt is damaged: its record" in text
    assert all(map(torch.equal, before, other.parameters()))


def crafted(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and make its checksum fit again."""
    file = path / "manifest.json"
    document = json.loads(file.read_bytes())["manifest"]
    change(document)
    body = json.dumps(document, separators=(",", ":")).encode()
    file.write_bytes(native._framed(body, 0))


def option(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["param_groups"][0].update({name: value})


def state(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Of each parameter; ``...`` leaves the state out."""

    def change(document: dict[str, Any]) -> None:
        for each in document["tensors"]:
            each["values"].pop(name)
            if value is not ...:
                each["values"][name] = value

    return change


CRAFTED = {
    "lr text": (option("lr", "0.1"), "option 'lr' of group 0 is '0.1'"),
    "lr none": (option("lr", None), "option 'lr' of group 0 is None"),
    "lr flag": (option("lr", True), "option 'lr' of group 0 is True"),
    "betas short": (option("betas", {"$tuple": [0.9]}), "option 'betas' of group 0"),
    "betas text": (option("betas", {"$tuple": ["a", 0.9]}), "option 'betas' of gr"),
    "flag number": (option("maximize", 1), "option 'maximize' of group 0 is 1"),
    "foreach list": (option("foreach", [1]), "option 'foreach' of group 0 is [1]"),
    "step text": (state("step", "7"), "has 'step' '7'; expected a number"),
    "step list": (state("step", [7]), "has 'step' [7]; expected a number"),
    "step none": (state("step", None), "has 'step' None; expected a number"),
    "step left out": (state("step", ...), "lacks 'step', which a step of AdamW reads"),
    "amsgrad": (option("amsgrad", True), "lacks 'max_exp_avg_sq', which a step of"),
}


@pytest.mark.req("K-10", "X-21")
@pytest.mark.parametrize("what", CRAFTED)
def test_optimizer_values_of_wrong_types_are_refused_before_a_change(
    what: str, tmp_path: Path
) -> None:
    """Of a manifest whose checksum fits; the model was half loaded and of no use."""
    change, expected = CRAFTED[what]
    model = nn.Linear(3, 2)

    def fresh(times: int) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters())
        for _ in range(times):
            model(torch.ones(3)).sum().backward()
            made.step()
        return made

    save(tmp_path / "run", model, fresh(1))
    crafted(tmp_path / "run", change)
    optimizer = fresh(1)
    before = [each.clone() for each in model.parameters()]
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}

    text = message_of(
        lambda: load(tmp_path, model, optimizer, options=LoadOptions(strict=False))
    )

    assert text.startswith("CheckpointError: load: ")
    assert expected in text
    assert "Nothing was loaded" in text
    assert all(map(torch.equal, before, model.parameters()))
    assert options.items() <= optimizer.param_groups[0].items()
    assert load(tmp_path, model) is None


@pytest.mark.req("K-10")
@pytest.mark.parametrize("name", STATES)
def test_the_states_that_are_demanded_are_those_that_torch_makes(name: str) -> None:
    """No more, so no good checkpoint is refused, and no fewer."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = getattr(torch.optim, name)([parameter])
    optimizer.step()

    assert set(optimizer.state[parameter]) == set(STATES[name])
