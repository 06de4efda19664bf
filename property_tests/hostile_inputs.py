"""Good checkpoints of each format, and how to spoil them.

A case is a list of changes ``(name, *numbers and values)`` whose ``repr`` repeats it.
Numbers stand for files, places and nodes: each is taken modulo how many there are.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import pickle
import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import convert, save
from composable_fsdp.storage import native

Change = tuple[Any, ...]
Files = dict[str, bytes]
KINDS = ("native", "dcp", "safetensors", "weights", "torch")
"""``weights``: one safetensors file; ``safetensors``: a directory with an index."""
SINGLE_FILES = {"weights": "run.safetensors", "torch": "run.pt"}
PLACES = st.integers(0, 2**16)
NODES = st.integers(0, 2**10)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with a tie and a buffer, and AdamW with state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.append(nn.Linear(4, 4))
    model[3].weight = model[2].weight
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def good_checkpoints(folder: Path) -> dict[str, Files]:
    """The files of a good checkpoint of each kind, by name."""
    extra = {"epoch": 3, "seen": torch.arange(4), "words": ["a", {"b": None}]}
    save(folder / "native", *make_model(), extra)
    convert(folder / "native", folder / "dcp", "dcp")
    convert(folder / "native", folder / "st", "safetensors", max_shard_bytes=80)
    convert(folder / "native", folder / SINGLE_FILES["weights"], "safetensors")
    convert(folder / "native", folder / SINGLE_FILES["torch"], "torch")
    found = {
        kind: {each.name: each.read_bytes() for each in (folder / name).iterdir()}
        for kind, name in (("native", "native"), ("dcp", "dcp"), ("safetensors", "st"))
    }
    for kind, name in SINGLE_FILES.items():
        found[kind] = {name: (folder / name).read_bytes()}
    return found


def write(files: Files, kind: str, folder: Path) -> Path:
    """Write the files of a checkpoint into ``folder``; return the checkpoint's path."""
    if kind in SINGLE_FILES:
        folder.mkdir()
        path = folder / SINGLE_FILES[kind]
        path.write_bytes(next(iter(files.values())))
        return path
    path = folder / "run"
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def _pick(files: Files, number: int) -> str:
    return sorted(files)[number % len(files)]


# ---- bytes --------------------------------------------------------------------

BYTES = st.one_of(
    st.tuples(st.just("flip"), NODES, PLACES, st.integers(0, 7)),
    st.tuples(st.just("put"), NODES, PLACES, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), NODES, PLACES, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("drop"), NODES, PLACES, PLACES),
    st.tuples(st.just("repeat"), NODES, PLACES, PLACES),
    st.tuples(st.just("swap"), NODES, NODES),
)


def change_bytes(files: Files, change: Change) -> None:
    """Change bytes of a file; places are 65536ths of its length."""
    what, number, *rest = change
    name = _pick(files, number)
    data = files[name]
    if what == "swap":
        other = _pick(files, rest[0])
        files[name], files[other] = files[other], data
        return
    at = rest[0] * len(data) >> 16
    head, tail = data[:at], data[at:]
    if what == "flip" and tail:
        tail = bytes([tail[0] ^ 1 << rest[1]]) + tail[1:]
    elif what == "put":
        tail = rest[1] + tail[len(rest[1]) :]
    elif what == "insert":
        tail = rest[1] + tail
    elif what in ("drop", "repeat"):
        end = rest[1] * len(data) >> 16
        tail = data[end:] if what == "drop" else data[min(at, end) : at] + tail
    files[name] = head + tail


# ---- names --------------------------------------------------------------------

NAMES = st.one_of(
    st.tuples(st.just("remove"), NODES),
    st.tuples(st.just("rename"), NODES, NODES),
    st.tuples(st.just("directory"), NODES),
    st.tuples(st.just("pipe"), NODES),
    st.tuples(
        st.just("link"),
        NODES,
        st.sampled_from(["../../outside", "self", "/etc/passwd", "/dev/zero", ".", ""]),
    ),
)


def change_names(path: Path, change: Change) -> None:
    """Change what lies at the checkpoint's names."""
    what, *rest = change
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    if not found or not os.path.lexists(path):
        return
    each = found[rest[0] % len(found)]
    if what == "rename":
        with contextlib.suppress(OSError):  # from a file to a directory
            each.rename(found[rest[1] % len(found)])
        return
    if each.is_dir() and not each.is_symlink():
        shutil.rmtree(each)
    else:
        each.unlink()
    if what == "directory":
        each.mkdir()
    elif what == "pipe":
        os.mkfifo(each)
    # A link at the path that a user passes is the user's own.
    elif what == "link" and rest[1] and path.is_dir():
        to = os.path.join(rest[1], each.name) if "outside" in rest[1] else rest[1]
        each.symlink_to(each.name if to == "self" else to)


# ---- values of JSON -----------------------------------------------------------

DEEP = "@deep"
"""A text that the writer replaces by lists too deep for a recursive reader."""
TEXTS = (
    *("", "..", "/etc/passwd", "../outside/manifest.json", "a\0b", "a\nb"),
    *("x" * 5000, "\ud800", "model.safetensors", "manifest.json", "weight", DEEP),
)
NUMBERS = (-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 10**4200, 1.5, 1e300, math.nan, True)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.integers(),
    st.text(max_size=4),
    st.sampled_from(
        [
            *([], {}, [[]], [1, 2], [None], ["weight"], {"a": "b"}),
            *({"$tensor": 0}, {"$tensor": -1}, {"$map": [["$a", 1], ["$a", 2]]}),
            *({"$number": ["float32", 10**400]}, {"$tuple": [{"$tuple": 1}]}),
            *({"$number": ["bool", 2]}, {"$float": [1]}, {"$map": [[[], 1]]}),
        ]
    ),
)
JSON = st.one_of(
    st.tuples(st.just("set"), NODES, NODES, VALUES),
    st.tuples(st.just("delete"), NODES, NODES),
    st.tuples(st.just("key"), NODES, NODES, st.sampled_from(TEXTS)),
    st.tuples(st.just("twin"), NODES, NODES, VALUES),
    st.tuples(st.just("copy"), NODES, NODES, NODES),
)


class Twin(str):
    """A key of a dict that may stand there twice."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _nodes(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or field) below ``value``, as far as a change may have led.

    Keys are looked into, too: those of DCP's metadata are objects.
    """
    if depth > 12:
        return
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    elif hasattr(value, "__dataclass_fields__"):
        items = [(n, getattr(value, n, None)) for n in value.__dataclass_fields__]
    for key, each in items:
        yield value, key
        yield from _nodes(key, depth + 1)
        yield from _nodes(each, depth + 1)


def _value(at: Any, key: Any) -> Any:
    return at[key] if isinstance(at, dict | list) else getattr(at, key, None)


def change_tree(tree: Any, change: Change) -> None:
    """Change one node of nested dicts, lists and dataclasses."""
    what, _, number, *rest = change
    # A tree that was copied into itself has too many.
    nodes = list(itertools.islice(_nodes(tree), 2000))
    if not nodes:
        return
    at, key = nodes[number * 2654435761 % len(nodes)]
    old, new = _value(at, key), rest[0] if what == "set" else None
    if what == "copy":
        new = _value(*nodes[rest[0] * 2654435761 % len(nodes)])
    if isinstance(old, torch.Size) and what == "set" and type(new) is int:
        new = torch.Size([new] * len(old)) if abs(new) < 2**62 else (new,)
    if not isinstance(at, dict | list):
        object.__setattr__(at, key, new)
    elif what == "delete":
        del at[key]
    elif what in ("set", "copy"):
        at[key] = new
    elif isinstance(at, dict):
        at[rest[0] if what == "key" else Twin(key)] = (
            at.pop(key) if what == "key" else rest[0]
        )


def change_json(files: Files, change: Change) -> None:
    """Change one node of a manifest, an index or a header, and mend its checksum."""
    name = _pick(files, change[1])
    data, tail = files[name], b""
    if name == "manifest.json":
        size = len(native._HEAD % (0, 0))
        data = data[size : -len(native._TAIL)]
    elif not name.endswith(".json"):
        length = int.from_bytes(data[:8], "little")
        data, tail = data[8 : 8 + length], data[8 + length :]
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):  # changed before
        return
    change_tree(tree, change)
    try:
        text = json.dumps(tree).encode()
    except (ValueError, RecursionError):  # a node was copied into itself
        return
    data = text.replace(json.dumps(DEEP).encode(), b"[" * 10**5 + b"]" * 10**5)
    if name == "manifest.json":
        files[name] = native._framed(data, 0)
        return
    head = b"" if name.endswith(".json") else len(data).to_bytes(8, "little")
    files[name] = head + data + tail


# ---- values of pickles --------------------------------------------------------


def endless(depth: int = 64) -> Any:
    """A tuple of few bytes in a pickle, and of 2 ** depth items when it is walked."""
    value: Any = (1,)
    for _ in range(depth):
        value = (value, value)
    return value


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _chain(depth: int = 400) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _odd_dict() -> OrderedDict[str, Any]:
    value: OrderedDict[str, Any] = OrderedDict(weight=torch.ones(2))
    value._metadata = 5  # type: ignore[attr-defined]  # as ``state_dict`` sets it
    return value


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)


MAKERS: dict[str, Callable[[], Any]] = {
    "endless": endless,
    "endless lists": lambda: [endless(40)],
    "itself": _itself,
    "chain": _chain,
    "odd dict": _odd_dict,
    "expanded": lambda: torch.ones(1).expand(2**40),
    "expanded twice": lambda: torch.ones(1, 2).expand(2**20, 2),
    "expanded square": lambda: torch.ones(2).expand(2**20, 2**20, 2),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "quantized": _quantized,
    "tensor": lambda: torch.ones(2),
    "scalar": lambda: torch.tensor(2),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "dtype": lambda: torch.float32,
    "size": lambda: torch.Size([2**40]),
    "set": lambda: {1, 2},
    "bytes": lambda: b"weight",
    "complex": lambda: 1j,
    "tuple": lambda: ("weight", (1, [2])),
    "int keys": lambda: {0: {"exp_avg": torch.ones(1)}, None: 1, (1,): 2, 1.5: 3},
    "state": lambda: {"state": {"weight": 1}, "param_groups": [{"params": [[]]}]},
    "groups": lambda: [{"params": [0], "param_names": 5}],
    "names": lambda: [{"params": [0], "param_names": [["a"]]}],
    "huge": lambda: 10**5000,
}
OBJECTS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([*MAKERS]).map(lambda name: ("make", name)), VALUES
)


def _tree_changes(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Change]:
    names = st.sampled_from([*TEXTS, 0, None])
    return st.one_of(
        st.tuples(st.just("set"), st.just(0), NODES, values),
        st.tuples(st.just("delete"), st.just(0), NODES),
        st.tuples(st.just("key"), st.just(0), NODES, names),
        st.tuples(st.just("copy"), st.just(0), NODES, NODES),
    )


def _made(change: Change) -> Change:
    """The change with the object of a ``("make", name)`` in its place."""
    return tuple(
        MAKERS[each[1]]() if isinstance(each, tuple) and each[:1] == ("make",) else each
        for each in change
    )


RECORDS = st.tuples(
    st.just("record"), st.just(0), PLACES, st.binary(min_size=1, max_size=4)
)


def change_torch(files: Files, changes: list[Change]) -> None:
    """Change nodes of the tree in a ``torch.save`` file, or bytes of its pickle, under
    checksums that stay good."""
    (name,) = files
    tree = torch.load(io.BytesIO(files[name]), weights_only=False)
    for change in changes:
        if change[0] != "record":
            change_tree(tree, _made(change))
    saved, out = io.BytesIO(), io.BytesIO()
    torch.save(tree, saved)
    with (
        zipfile.ZipFile(saved) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target,
    ):
        for record in source.infolist():
            pickled = {"x": source.read(record)}
            for change in changes:
                if change[0] == "record" and record.filename.endswith("data.pkl"):
                    change_bytes(pickled, ("put", *change[1:]))
            target.writestr(record.filename, pickled["x"])
    files[name] = out.getvalue()


def change_metadata(files: Files, changes: list[Change]) -> None:
    """Change nodes of DCP's metadata: fields, keys and items."""
    metadata = pickle.loads(files[".metadata"])
    for change in changes:
        change_tree(metadata, change)
    with contextlib.suppress(Exception):  # a class refuses to pickle some fields
        files[".metadata"] = pickle.dumps(metadata)


CHANGES: dict[str, tuple[tuple[str, ...], st.SearchStrategy[Change]]] = {
    "bytes": (KINDS, BYTES),
    "names": (KINDS, NAMES),
    "json": (("native", "safetensors", "weights"), JSON),
    "tree": (("torch",), st.one_of(_tree_changes(OBJECTS), RECORDS)),
    "metadata": (("dcp",), _tree_changes(VALUES)),
}
"""Kinds of checkpoints, and what is changed of them."""
Case = tuple[str, str, list[Change]]
"""One of ``CHANGES``, a kind, and one to three changes."""


def spoil(what: str, files: Files, changes: list[Change]) -> None:
    """Make changes of any of ``CHANGES`` but those of names."""
    if what in ("tree", "metadata"):
        (change_torch if what == "tree" else change_metadata)(files, changes)
    for change in changes:
        if what in ("bytes", "json"):
            (change_bytes if what == "bytes" else change_json)(files, change)
