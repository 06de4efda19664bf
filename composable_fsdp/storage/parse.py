"""Parses JSON into a manifest: every field present, of its type and range, no others.

No value of the document is trusted, and no memory is allocated by a size that the
document claims: the work is bounded by the length of the text. ``validate`` checks how
the fields fit together.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.manifest import (
    DTYPES,
    FORMAT,
    VERSION,
    EntryPlace,
    Json,
    Manifest,
    Rule,
    Size,
)

_EXPECTED = {str: "a string", list: "a list", dict: "an object"}
_fields = cache(lambda kind: get_type_hints(kind, include_extras=True))


_MOST = 80
"""Most characters of a value in a message."""
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _MOST
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MOST + 20


def excerpt(value: object) -> str:
    """Return the begin of ``repr(value)``, for a value of any length and nesting."""
    # ``repr`` recurses, so for a damaged value the stack might end first.
    text = _REPR.repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


class _UnexpectedError(Exception):
    """A value is not as expected: (path, words for the expected values, value)."""

    def within(self, place: str) -> _UnexpectedError:
        """Return the error with the path from the object around the value."""
        path, *others = self.args
        return _UnexpectedError(f"{place}{path}", *others)


def parse_fields(document: Json, file: str) -> Manifest:
    """Return the manifest in ``document``; ``file`` is the document's name in messages.

    Raises: CheckpointError, naming the file and the field.
    """
    try:
        _require_version(document, file)
        manifest: Manifest = _parser(Manifest)(document)
    except _UnexpectedError as error:
        where, expected, got = error.args
        where = where.removeprefix(".")
        raise CheckpointError(
            f"{file}: {where or 'the manifest'} is {excerpt(got)}, expected "
            f"{expected}. The "
            "manifest is damaged or was edited; use another checkpoint."
        ) from None
    return manifest


def _require_version(document: Json, file: str) -> None:
    """Check format and version of the document."""
    # Before all other fields, because another version may have other fields.
    found = document.get("format") if isinstance(document, dict) else document
    # Any JSON file can lie at this path, for example an index of another program.
    if found != FORMAT:
        raise _UnexpectedError("format", repr(FORMAT), found)
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{file} is of format version {excerpt(version)}; this version of "
            f"composable_fsdp reads version {VERSION}. Read it with the release that "
            "wrote it, or a newer one."
        )


_Parser = Callable[[Json], Any]
"""Returns a JSON value as an object. Raises: _UnexpectedError."""


@cache
def _parser(kind: Any) -> _Parser:
    """Return the parser of an annotation: of a field of ``Manifest``, or of a part.

    Made once per annotation: a manifest of 10,000 parameters has 400,000 values.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _with_rule(*inner)
    # ``list[Json] | None``: without an optimizer there are no options.
    if origin is UnionType:
        parse = _parser(inner[0])
        return lambda value: None if value is None else parse(value)
    if kind is torch.dtype:
        return _dtype
    if kind is EntryPlace:
        return _place
    # Values of any form: ``validate`` decodes them.
    if kind is Any:
        return lambda value: value
    json_kind: Any = list if origin is tuple else origin or kind
    if json_kind not in _EXPECTED:
        return _object(kind)
    return _container(json_kind, inner, is_tuple=origin is tuple)


def _with_rule(whole: Any, rule: Rule) -> _Parser:
    """Return the parser of values that a rule holds for."""
    parse, holds = None if whole is int else _parser(whole), rule.holds

    def parse_ruled(value: Json) -> Any:
        found = value if parse is None else parse(value)
        if not holds(found):
            raise _UnexpectedError("", rule.expected, value)
        return found

    return parse_ruled


def _dtype(value: Json) -> torch.dtype:
    """Return a dtype by name."""
    # Only names of the table: never ``getattr`` of torch with a text from a file.
    if not isinstance(value, str) or value not in DTYPES:
        raise _UnexpectedError("", "the name of a dtype", value)
    return DTYPES[value]


def _place(value: Json) -> EntryPlace:
    """Return the place of an entry."""
    # ``validate`` checks that the file exists and the bytes lie in the file.
    found = _parser(tuple[Size, ...])(value)
    if len(found) != 2:
        raise _UnexpectedError("", "[file, begin]", value)
    return EntryPlace(*found)


def _container(kind: Any, inner: tuple[Any, ...], *, is_tuple: bool) -> _Parser:
    """Return the parser of a text, list or object."""
    # Items of other lists are values of any form.
    is_dict = kind is dict and bool(inner)
    parse = _parser(inner[-1 if is_dict else 0]) if is_tuple or is_dict else None

    def parse_items(value: Json) -> Any:
        if not isinstance(value, kind):
            raise _UnexpectedError("", _EXPECTED[kind], value)
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
        except _UnexpectedError as error:
            raise error.within(f"[{key!r}]") from None
        return tuple(items)

    return parse_items


def _object(kind: Any) -> _Parser:
    """Return the parser of a dataclass."""
    parsers = {name: _parser(hint) for name, hint in _fields(kind).items()}

    def parse_fields_of(value: Json) -> Any:
        # Unknown fields are refused, too: a reader that ignored a field could
        # misunderstand the other fields.
        if not isinstance(value, dict) or value.keys() != parsers.keys():
            got = sorted(value) if isinstance(value, dict) else value
            raise _UnexpectedError("", f"an object of {', '.join(parsers)}", got)
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, parse in parsers.items():
                found[name] = parse(value[name])
        except _UnexpectedError as error:
            raise error.within(f"{_label(found)}.{name}") from None
        return kind(**found)

    return parse_fields_of


def _label(found: dict[str, Any]) -> str:
    """Return the names in an object, of which the fields so far are known."""
    # Messages name the parameter, not only the index.
    return f" ({found['fqns'][0]!r})" if "fqns" in found else ""
