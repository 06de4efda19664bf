"""Claims on files that ask for more than they are, and on values of wrong types."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import LoadOptions, load, save, verify
from composable_fsdp.storage import native
from composable_fsdp.storage.load_optim import STATES
from composable_fsdp.storage.opening import open_source
from tests.support.sharded import message_of

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
