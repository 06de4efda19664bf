"""Claims on the manifest: what makes no sense is refused by name, whatever it is."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.storage.manifest import to_json
from composable_fsdp.storage.validate import parse
from composable_fsdp.storage.values import decode, encode
from tests.support.sharded import message_of

Json = Any


def entry(file: int, begin: int) -> Json:
    return [file, begin]


def stored(shape: list[int], at: Json) -> Json:
    return {"dtype": "float32", "shape": shape, "at": at}


def tensor(names: list[str], shape: list[int], *parts: Json, **more: Json) -> Json:
    """A tensor that is stored by intervals, unless ``more`` says otherwise."""
    whole = {"cuts": [[0] for _ in shape], "begins": [[0]], "states": {}, "values": {}}
    return {
        "fqns": names,
        "dtype": "float32",
        "shape": shape,
        **whole,
        "parts": list(parts),
        **more,
    }


def exp(*parts: Json) -> Json:
    return {"exp": {"dtype": "float32", "parts": list(parts)}}


def local(file: int, begin: int) -> Json:
    """An expert of a rank, with options."""
    expert = tensor(["expert"], [1], entry(file, begin), values={"step": 1})
    return {
        "tensors": [expert],
        "own_states": {"e._extra_state": begin},
        "values": {},
        "param_groups": [{"lr": 0.2, "params": ["expert"]}],
    }


def sound() -> Json:
    """A manifest of two ranks: parameters, with a state, a buffer, a loose tensor."""
    tensors = [
        tensor(["a", "tied"], [2, 2], entry(0, 0), values={"step": 3}),
        tensor(
            ["b"],
            [3],
            entry(0, 16),
            entry(1, 0),
            begins=[[0, 1]],
            states=exp(entry(0, 20), entry(1, 8)),
        ),
        tensor(
            ["lora"],
            [3, 1],
            entry(0, 24),
            entry(1, 16),
            begins=[[0, 2]],
            states=exp(entry(0, 32), entry(1, 20)),
            values={"step": 3},
        ),
        tensor(["buf"], [2], entry(0, 40), values={"x": {"$float": "nan"}}),
    ]
    files = [
        {
            "name": f"rank{r}.safetensors",
            "header_nbytes": 64,
            "header_crc32": 7,
            "payload_nbytes": size,
            "blocks": [1],
        }
        for r, size in enumerate((56, 28))
    ]
    return {
        "format": "composable_fsdp.checkpoint",
        "version": 1,
        "library": "0",
        "torch": "2",
        "world_size": 2,
        "block_nbytes": 4 * 2**20,
        "files": files,
        "tensors": tensors,
        "wrappers": {},
        "local": [local(0, 52), local(1, 24)],
        "loose": [stored([1], entry(0, 48))],
        "param_groups": [{"lr": 0.1, "params": ["a", "b"]}],
        "extra": {"t": {"$tensor": 0}},
        "own_states": {"m._extra_state": {"$tuple": [1]}},
        "rng": [{}, {}],
        "per_rank": [{}, {"at": {"$map": [[1, {"$tuple": [2, {"$float": "inf"}]}]]}}],
    }


def columned() -> Json:
    """The same with a parameter of rectangles: columns 0 and 1, and column 2."""
    document = sound()
    columns = tensor(
        ["columns"],
        [2, 3],
        entry(0, 56),
        entry(1, 28),
        entry(1, 32),
        cuts=[[0], [0, 2]],
        begins=[[0, 3], [0]],
        states=exp(entry(0, 68), entry(1, 40), entry(1, 44)),
        values={"step": 3},
    )
    for file, size in zip(document["files"], (80, 52), strict=True):
        file["payload_nbytes"] = size
    document["tensors"][3]["fqns"] = ["buf_of.codes"]
    document["tensors"].append(columns)
    return {**document, "wrappers": {"buf_of": "Rows (2,)"}}


def test_the_example_is_sound() -> None:
    """And comes back as it was, so what the tests below break is what is found."""
    assert to_json(parse(sound(), "m.json")) == sound()
    assert to_json(parse(columned(), "m.json")) == columned()


def put(path: str, value: Json) -> Callable[[Json], None]:
    """Set what stands at a dotted path."""

    def change(document: Json) -> None:
        *parents, last = [int(p) if p.isdecimal() else p for p in path.split(".")]
        for parent in parents:
            document = document[parent]
        document[last] = value

    return change


HUGE = 2**61
BAD: dict[str, tuple[Callable[[Json], None], str]] = {
    "negative begin": (put("tensors.1.begins.0", [0, -1]), "('b').begins[0][1] is -1"),
    "gap in the payload": (
        put("tensors.1.parts.1", entry(1, 8)),
        "elements 1 to 3 of 'b' begins at byte 8, expected 0",
    ),
    "overlapping boxes": (
        put("tensors.3.parts.0", entry(0, 16)),
        "'buf' begins at byte 16, expected 20",
    ),
    "offset out of range": (
        put("tensors.3.parts.0", entry(0, 64)),
        "'buf' ends at byte 72 of",
    ),
    "huge size": (put("tensors.1.shape", [HUGE]), "elements 1 to 2305843009213693952"),
    "huge product": (put("tensors.1.shape", [2**40, 2**40]), "('b').shape"),
    "way out": (put("files.0.name", "../x.safetensors"), "is no plain name inside the"),
    "twice the same file": (
        put("files.0.name", "rank1.safetensors"),
        "stands twice in",
    ),
    "version": (put("version", 2), "format version 2"),
    "part of a state": (
        put("tensors.2.states.exp.parts", [entry(0, 32)]),
        "state 'exp' of 'lora' of shape (3, 1) has 1 parts, expected 2",
    ),
    "state of a cut twice": (
        put("tensors.2.values", {"exp": 1}),
        "state 'exp' of 'lora' of shape (3, 1) stands there twice",
    ),
    "ranks left out": (
        put("local", [local(0, 52)]),
        "in rank1.safetensors, elements 2",
    ),
    "expert twice": (put("local.1.tensors.0.fqns", ["a"]), "'a' stand there twice"),
    "scalar of a rank": (
        put("local.0.values", {"b": {"norm": 1}}),
        "local[0].values is {'b': {'norm': 1}}, expected an empty object",
    ),
    "values of too few ranks": (put("per_rank", [{}]), "per_rank has 1 values for 2"),
    "other format": (put("format", "zip"), "format is 'zip', expected"),
    "unknown field": (put("tensors.0.more", 1), "tensors[0] is ['begins', 'cuts'"),
    "dtype": (put("tensors.0.dtype", "object"), "tensors[0] ('a').dtype is 'object'"),
    "loose tensor": (put("extra.t", {"$tensor": 1}), "loose tensor 1 is asked for"),
    "unused tensor": (put("extra", None), "not referred to once each"),
    "group of strangers": (put("param_groups.0.params", ["z"]), "does not list param"),
}


BAD_COLUMNS: dict[str, tuple[Callable[[Json], None], str]] = {
    "no cut of a dim": (put("tensors.4.cuts", [[0, 2]]), "has 2 rectangles cut at"),
    "rectangle too few": (put("tensors.4.begins", [[0, 3]]), "has 1 rectangles cut at"),
    "huge columns": (
        put("tensors.4", {**columned()["tensors"][4], "shape": [2**30, 2**30]}),
        "of 52 bytes of payload",
    ),
    "huge product of cuts": (
        put(
            "tensors.4",
            {
                **columned()["tensors"][4],
                "shape": [2] * 60,
                "cuts": [[0, 1]] * 60,
            },
        ),
        "has 2 rectangles cut at",
    ),
    "part behind the rectangle": (
        put("tensors.4.begins.0", [0, 4]),
        "parts that begin at elements (0, 4) of the rectangle at (0, 0)",
    ),
    "wrapper without tensors": (
        put("wrappers", {"buf": "Rows"}),
        "'buf' wraps tensors, and none is there",
    ),
}


@pytest.mark.req("X-20")
@pytest.mark.parametrize(
    ("made", "change", "expected"),
    [
        pytest.param(made, *case, id=name)
        for made, cases in ((sound, BAD), (columned, BAD_COLUMNS))
        for name, case in cases.items()
    ],
)
def test_what_makes_no_sense_is_refused_by_file_and_name(
    made: Callable[[], Any], change: Callable[[Any], object], expected: str
) -> None:
    """In time and memory of the text, naming the parameter; rectangles as all else."""
    document = made()
    change(document)

    tracemalloc.start()
    text = message_of(lambda: parse(document, "m.json"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert text.startswith("CheckpointError: m.json")
    assert expected in text
    # A claimed size is never allocated.
    assert peak < 300_000


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)
)
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=3), st.just("$tensor")), inner),
    ),
    max_leaves=10,
)


@given(value=nested)
def test_nested_values_come_back_through_json(value: Any) -> None:
    """NaN, infinities and keys that look like marks included, through strict JSON."""
    encoded = encode(value, "extra", lambda tensor, where: 0)

    text = json.dumps(encoded, allow_nan=False)

    assert repr(decode(json.loads(text), "m", lambda index: None)) == repr(value)
