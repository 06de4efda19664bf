"""Turns frozen dataclasses into JSON and back, by the annotations of their fields.

No value of a document is trusted, and no memory is allocated by a size that the
document claims: the work is bounded by the length of the text.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch

from composable_fsdp.errors import CheckpointError

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
