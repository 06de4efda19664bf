"""The manifest of a checkpoint directory: frozen integers and names, to and from JSON.

An entry holds the bytes of a part of a tensor: an interval of a flattened rectangle;
``[file, begin]`` is its place. Of most tensors there is one rectangle, the whole.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise, product
from math import prod
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.planning.partition import Box, interval_boxes, moved

Json = Any

# safetensors has no code for complex128 and for quantized dtypes.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a safetensors file can hold, with their codes in the header."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` without the module: ``float32``."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in CODES}


def require_storable(dtype: torch.dtype, what: str) -> None:
    """Raise CheckpointError, naming ``what``, for a dtype that no file can hold."""
    if dtype not in CODES:
        raise CheckpointError(
            f"{what} has dtype {dtype}, which a checkpoint cannot hold; expected one "
            f"of {', '.join(sorted(DTYPES))}. Convert it before saving."
        )


class Rule(NamedTuple):
    """A rule for the values of a field that the field's type does not state."""

    expected: str
    holds: Callable[[Any], bool]


def to_json(value: Any) -> Json:
    """Return the value of a field for ``json.dumps``."""
    # Most values by far: places of shards and checksums of blocks.
    if type(value) is int or type(value) is str:
        return value
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    return dtype_name(value) if isinstance(value, torch.dtype) else value


_EXPECTED = {str: "a string", list: "a list", dict: "an object"}
_MOST = 80
"""Most characters of a value in a message."""
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _MOST
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MOST + 20
DAMAGED = (
    "The checkpoint is damaged, was edited, or is of a development version that was "
    "not released; use another checkpoint."
)


def excerpt(value: object) -> str:
    """Return the begin of ``repr(value)``, for a value of any length and nesting."""
    # ``repr`` recurses, so for a damaged value the stack might end first.
    text = _REPR.repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


class MalformedError(Exception):
    """A document does not hold what a save writes; the text says where."""


class UnexpectedError(MalformedError):
    """A value is not as expected: (path, words for the expected values, value)."""

    def within(self, place: str) -> UnexpectedError:
        """Return the error with the path from the object around the value."""
        path, *others = self.args
        return UnexpectedError(f"{place}{path}", *others)

    def __str__(self) -> str:
        path, expected, got = self.args
        where = path.removeprefix(".") or "the manifest"
        return f"{where} is {excerpt(got)}, expected {expected}"


Parser = Callable[[Json], Any]
"""Returns a JSON value as an object. Raises: UnexpectedError."""


@cache
def parser_of(kind: Any) -> Parser:
    """Return the parser of an annotation: of a dataclass, or of a part of one."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _ruled(*inner)
    if origin is UnionType:
        parse = parser_of(inner[0])
        return lambda value: None if value is None else parse(value)
    if kind is torch.dtype:
        # Only names of the table: never ``getattr`` of torch with a text from a file.
        known = parser_of(
            Annotated[str, Rule("the name of a dtype", lambda name: name in DTYPES)]
        )
        return lambda value: DTYPES[known(value)]
    # Values of any form: ``validate`` decodes them.
    if kind is Any:
        return lambda value: value
    json_kind: Any = list if origin is tuple else origin or kind
    if json_kind in _EXPECTED:
        return _container(json_kind, inner, is_tuple=origin is tuple)
    hints = get_type_hints(kind, include_extras=True)
    return (_object if is_dataclass(kind) else _row)(kind, hints)


def _ruled(whole: Any, rule: Rule) -> Parser:
    """Return the parser of values that a rule holds for."""
    parse, holds = None if whole is int else parser_of(whole), rule.holds

    def parse_ruled(value: Json) -> Any:
        found = value if parse is None else parse(value)
        if not holds(found):
            raise UnexpectedError("", rule.expected, value)
        return found

    return parse_ruled


def _row(kind: Any, hints: dict[str, Any]) -> Parser:
    """Return the parser of a named tuple, whose fields are alike."""
    whole: Any = tuple
    parse = parser_of(whole[next(iter(hints.values())), ...])

    def parse_row(value: Json) -> Any:
        found = parse(value)
        if len(found) != len(hints):
            raise UnexpectedError("", f"[{', '.join(hints)}]", value)
        return kind(*found)

    return parse_row


def _container(kind: Any, inner: tuple[Any, ...], *, is_tuple: bool) -> Parser:
    """Return the parser of a text, list or object."""
    is_dict = kind is dict and bool(inner)
    parse = parser_of(inner[-1 if is_dict else 0]) if is_tuple or is_dict else None

    def parse_items(value: Json) -> Any:
        if not isinstance(value, kind):
            raise UnexpectedError("", _EXPECTED[kind], value)
        if parse is None:
            return value
        key: Any = 0
        try:
            if is_dict:
                made = {}
                for key, item in value.items():
                    made[key] = parse(item)
                return made
            items = []
            for item in value:
                items.append(parse(item))
                key += 1
        except UnexpectedError as error:
            raise error.within(f"[{key!r}]") from None
        return tuple(items)

    return parse_items


def _object(kind: Any, hints: dict[str, Any]) -> Parser:
    """Return the parser of a dataclass."""
    parsers = {name: parser_of(hint) for name, hint in hints.items()}

    def parse_object(value: Json) -> Any:
        # A reader that ignored a field could misunderstand the others.
        if not isinstance(value, dict) or value.keys() != parsers.keys():
            got = sorted(value) if isinstance(value, dict) else value
            raise UnexpectedError("", f"an object of {', '.join(parsers)}", got)
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, parse in parsers.items():
                found[name] = parse(value[name])
        except UnexpectedError as error:
            of = f" ({found['fqns'][0]!r})" if "fqns" in found else ""
            raise error.within(f"{of}.{name}") from None
        return kind(**found)

    return parse_object


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The indices ``[offset[d], offset[d] + shape[d])`` of each dim of a tensor."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Number of elements that are adjacent in the whole tensor as well."""
        for dim in reversed(range(len(self.shape))):
            if self.shape[dim] != self.whole[dim]:
                return prod(self.shape[dim:])
        return self.numel

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield elements ``[start, stop)`` as intervals of the whole tensor."""
        width = self.width
        while start < stop:
            count = min(stop - start, width - start % width)
            at, stride, element = 0, 1, start
            for dim in reversed(range(len(self.shape))):
                element, index = divmod(element, self.shape[dim])
                at += (self.offset[dim] + index) * stride
                stride *= self.whole[dim]
            yield at, at + count
            start += count


class Span(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tensor, or of a rectangle of it."""

    start: int
    stop: int
    rectangle: Rectangle | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def within(self, shape: tuple[int, ...]) -> Rectangle:
        """Return the rectangle, which may be the whole of a tensor of ``shape``."""
        return self.rectangle or Rectangle(shape, (0,) * len(shape), shape)

    def boxes(self, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Return the elements as boxes of the whole tensor."""
        box = self.within(shape)
        return moved(interval_boxes(box.shape, self.start, self.stop), box.offset)

    def told(self, shape: tuple[int, ...]) -> str:
        """Return the boxes as text for messages."""
        found = self.boxes(shape)
        return ", ".join(f"[offsets {b.offsets} sizes {b.sizes}]" for b in found)

    def part(self, begin: int, end: int) -> Span:
        """Return elements ``[begin, end)`` of these."""
        return Span(self.start + begin, self.start + end, self.rectangle)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Return the elements as intervals of the whole tensor, in order."""
        if self.rectangle is None:
            return iter([(self.start, self.stop)])
        return self.rectangle.runs(self.start, self.stop)


FORMAT = "composable_fsdp.checkpoint"
# A reader refuses another version, because fields may have another meaning there.
VERSION = 1
# A slice is verified by whole blocks; smaller blocks make a larger manifest.
BLOCK = 4 * 1024 * 1024
"""The largest number of bytes of payload that a single checksum covers."""
SMALLEST_BLOCK = 1 << 14
"""The smallest number of bytes that a checksum covers."""
_MOST_BLOCKS = 1 << 14
"""The number of checksums above which a checkpoint gets larger blocks."""


def block_size(nbytes: int) -> int:
    """Return the bytes that a checksum covers in a checkpoint of ``nbytes``."""
    size = SMALLEST_BLOCK
    while size < BLOCK and nbytes > size * _MOST_BLOCKS:
        size *= 2
    return size


LARGEST = 2**62
"""The largest size or offset: no real file is as large, and products stay cheap."""
_MAX_DIMS = 64


def _up_to(most: int) -> Rule:
    """Return the rule for an integer from 0 to ``most``."""
    # ``type`` and not ``isinstance``: a bool is an int in Python.
    return Rule(
        f"an integer from 0 to {most}", lambda n: type(n) is int and 0 <= n <= most
    )


def _fits_into_a_file(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of ``shape`` has at most ``LARGEST`` elements."""
    numel = 1
    for size in shape:
        numel *= size
        # At the limit: the product of many large sizes takes very long to compute.
        if numel > LARGEST:
            return False
    return len(shape) <= _MAX_DIMS


Size = Annotated[int, _up_to(LARGEST)]
Crc = Annotated[int, _up_to(2**32 - 1)]
# The largest header in bytes that the safetensors library reads.
HeaderSize = Annotated[int, _up_to(100_000_000)]
# Powers of two, so blocks of two sizes never overlap in part.
BlockSize = Annotated[
    int,
    Rule(
        f"a power of two from {SMALLEST_BLOCK} to {BLOCK}",
        lambda n: type(n) is int and SMALLEST_BLOCK <= n <= BLOCK and n & (n - 1) == 0,
    ),
]
Shape = Annotated[
    tuple[Size, ...], Rule("a shape that fits into a file", _fits_into_a_file)
]
Names = Annotated[
    tuple[str, ...],
    Rule("one or more different names", lambda n: 0 < len(n) == len(set(n))),
]
Empty = Annotated[dict[str, Json], Rule("an empty object", lambda v: not v)]


class EntryPlace(NamedTuple):
    """The beginning of an entry: the file's index, and a byte in the file's payload."""

    file: Size
    begin: Size


Places = tuple[EntryPlace, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor without a name, stored in a single entry at the place ``at``."""

    dtype: torch.dtype
    shape: Shape
    at: EntryPlace

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedState:
    """An element-wise optimizer state of a tensor; ``parts`` as those of the tensor."""

    dtype: torch.dtype
    parts: tuple[EntryPlace, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the model, which is stored by rectangles, each in parts."""

    fqns: Names
    dtype: torch.dtype
    shape: Shape
    cuts: tuple[tuple[Size, ...], ...]
    begins: tuple[tuple[Size, ...], ...]
    parts: tuple[EntryPlace, ...]
    states: dict[str, SavedState]
    values: dict[str, Json]

    def entries(self) -> Iterator[tuple[str | None, torch.dtype, Places]]:
        """Yield the places of the tensor (None) and of its states, by name."""
        yield None, self.dtype, self.parts
        for name, state in self.states.items():
            yield name, state.dtype, state.parts

    def spans(self) -> Iterator[Span]:
        """Yield the elements of each part, in order."""
        for rectangle, begins in zip(self.rectangles(), self.begins, strict=True):
            for start, stop in pairwise((*begins, rectangle.numel)):
                yield Span(start, stop, rectangle)

    def rectangles(self) -> list[Rectangle]:
        """Return the rectangles, in the order of ``begins``."""
        spans = [
            [(a, b - a) for a, b in pairwise((*begins, size))]
            for begins, size in zip(self.cuts, self.shape, strict=True)
        ]
        return [
            Rectangle(self.shape, tuple(a for a, _ in each), tuple(n for _, n in each))
            for each in product(*spans)
        ]


@dataclass(frozen=True, slots=True)
class Local:
    """The values that a rank has saved for itself; see ``local``."""

    tensors: tuple[SavedTensor, ...]
    own_states: dict[str, Json]
    param_groups: list[Json] | None
    # Scalar state of parameters of units, in the first checkpoints of this version.
    values: Empty = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class File:
    """The file of a rank: sizes and checksums to verify before reading the payload."""

    name: str
    header_nbytes: HeaderSize
    """The byte at which the payload begins: 8 bytes of header length and the header."""
    # The header repeats facts of the manifest; the checksum shows that they agree.
    header_crc32: Crc
    payload_nbytes: Size
    blocks: tuple[Crc, ...]
    """The crc32 of each ``BLOCK`` bytes of payload; the last block may be shorter."""

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.header_nbytes + self.payload_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint without the values of tensors."""

    # A reader must refuse unknown keys, so a new field needs a new VERSION.
    format: str = FORMAT
    version: Size = VERSION
    library: str
    torch: str
    world_size: Size
    block_nbytes: BlockSize = BLOCK
    files: tuple[File, ...]
    tensors: tuple[SavedTensor, ...]
    # The facts of tensors that wrap others, by name.
    wrappers: dict[str, str]
    local: tuple[Local, ...]
    loose: tuple[Stored, ...]
    param_groups: list[Json] | None
    extra: Json
    own_states: dict[str, Json]
    rng: tuple[Json, ...]
    # Empty if no rank has given values of its own.
    per_rank: tuple[Json, ...]
